"""Matrix products of few rows on a CPU: weights packed for oneDNN, and kernels that are built where they run."""
