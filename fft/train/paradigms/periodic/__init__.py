"""Training whose groups step alone and synchronise now and then: LocalSGD and DiLoCo."""
