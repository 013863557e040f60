"""Plans of runs: search, estimate, proof, calibration, reports and pictures."""
