"""Drafters, verifiers, decoding, replay, latency and scores: is a drafter any good?"""
