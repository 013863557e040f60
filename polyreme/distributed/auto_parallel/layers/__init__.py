"""Layers, optimizers and loaders put on meshes: by functions, by plans for names, by marks of the older form."""
