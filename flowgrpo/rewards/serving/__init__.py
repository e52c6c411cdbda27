"""Rewards over HTTP: a client for requests to servers, and a server for any reward of the package."""
