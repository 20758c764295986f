"""What runs a packed batch: torch with a real model, a stand-in without one."""
