"""The Trainium side: device runtime, the port under test, and its runs; the command `mm2-test`."""
