"""Pure decisions of the connector: no clock, socket, thread, torch, vLLM or NIXL."""
