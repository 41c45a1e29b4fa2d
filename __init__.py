"""draftsmith makes the drafter (draft model) that speculative decoding needs.

Importing the package is cheap: torch and transformers load with the parts that use them.
"""

__version__ = "0.1.0"
