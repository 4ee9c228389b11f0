"""A real RL run that fits on two CPU cores: vLLM samples, torch trains, Foreshock watches."""
