"""File formats: zip archives as torch.save writes them, the pickles in them, and safetensors."""
