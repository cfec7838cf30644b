"""The records that a killed gpusnap leaves for recovery, and the files of volumes."""
