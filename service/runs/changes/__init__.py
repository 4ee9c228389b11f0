"""Changes within a run: of the setup, as its rollouts tell, and those that the trainer announces."""
