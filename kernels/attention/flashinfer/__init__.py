"""FlashInfer's attention kernels as a back end: `routes` says which of them serve a layer, `backend` calls them."""
