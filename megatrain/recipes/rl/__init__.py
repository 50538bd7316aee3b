"""Training on answers that the model writes itself: prompts, answers, rewards, steps."""
