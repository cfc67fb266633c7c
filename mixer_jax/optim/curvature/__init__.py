"""The curvature of any JAX function: from its program to Kronecker factors."""
