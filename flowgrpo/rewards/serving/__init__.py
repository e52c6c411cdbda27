"""Rewards over HTTP: the client that other servers are asked with, and a server for any reward of ours."""
