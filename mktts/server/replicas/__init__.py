"""Several complete servers behind one address: `python -m mktts serve --replicas N`, by Ray Serve and HAProxy.

Every replica is the ASGI application of `mktts.server.app` over a model of its own, one a GPU. Sound goes from a
replica through HAProxy to the listener: neither through a handle of Ray nor through its Python proxy. Ray is imported
by `cluster` alone, and there inside functions.
"""
