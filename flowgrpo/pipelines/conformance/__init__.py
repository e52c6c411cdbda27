"""Does a pipeline class work as a policy? A kit of checks, and tiny random instances of the classes of diffusers."""
