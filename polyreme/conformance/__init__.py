"""What every device must compute: the rows of the op contract, and the checks that each passes."""
