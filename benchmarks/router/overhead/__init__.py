"""The parts of the router benchmark."""
