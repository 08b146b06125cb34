"""The blocks of a model that is trained: parameters, gradients and optimizer states, on the drive and in memory while used."""
