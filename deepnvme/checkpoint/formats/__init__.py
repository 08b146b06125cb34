"""What files hold: archives as torch.save writes them, their pickles, and safetensors."""
