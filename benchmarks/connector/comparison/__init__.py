"""BidiNixlConnector and vLLM's stock NixlConnector side by side, on real engines; `../compare.py` runs it."""
