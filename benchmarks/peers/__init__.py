"""One module for each queue that is compared; `kit` has what they share."""
