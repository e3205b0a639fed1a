"""Builds by the dozen: jobs for a Kubernetes cluster, and what a fleet of them left behind."""
