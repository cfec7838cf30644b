"""What every GPU driver offers here, and the device files of any vendor."""
