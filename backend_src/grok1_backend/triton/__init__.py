"""What the `model.py` files of the model repository are made of: tensors, responses, sessions."""
