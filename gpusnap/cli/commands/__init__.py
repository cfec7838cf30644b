"""The commands of `gpusnap`, by what they are about; gpusnap.cli.main says which module has which."""
