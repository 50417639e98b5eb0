"""What the attentions of model.py are made of, and what makes them fast."""
