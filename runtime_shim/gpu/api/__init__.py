"""The interface of every GPU driver, and the device files of all vendors."""
