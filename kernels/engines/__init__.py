"""What runs a packed batch: native on a CPU, torch for other models, a stand-in without one."""
