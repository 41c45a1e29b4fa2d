"""What to do: typed settings, strict YAML loading, the shipped recipes and the stage runner."""
