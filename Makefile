# gpusnap: make TARGET, for example `make demo`. You need Debian 12 or later, root, python3, make and apt.
#
#   make demo               checkpoint and restore a GPU container with Podman, on a real GPU or one in software
#   make test               run everything that CI runs: style, types, unit tests, integration tests in Debian 13
#   make lint               check the style (ruff); make type checks the types (mypy)
#   make unit               run the unit tests alone; make integration runs the integration tests alone
#   make test-sid           run the integration tests with Debian sid's Podman, containerd and CRIU
#   make test-packages      install the packages in clean trees of Debian 12, 13 and Ubuntu 24.04, and use them
#   make native             build the C programs: the launcher, the GPU in software, the inner loops
#   make wheel              build a wheel and an sdist, in dist/
#   make deb                build a Debian package, in dist/
#   make bench-passthrough  measure what gpusnap-runtime adds to commands that it only passes on
#   make docs               write what the code says into docs/: errors, commands, manual pages, settings
#   make site               build the documentation as a site, in build/site
#   make demo-picture       draw docs/demo.svg, the picture in README.md, from a run of the demo
#   make clean              remove what these targets made, also the Debian tree for the tests

PYTHON ?= python3

.PHONY: help site docs demo demo-picture test test-sid unit integration lint type native wheel deb test-packages testhost bench-passthrough clean
help:
	@sed -n '1,16s/^# \{0,1\}//p' Makefile

demo:
	@$(PYTHON) demo/demo.py

demo-picture: build/docs/ready
	@PYTHONDONTWRITEBYTECODE=1 build/docs/bin/python -m tools.docs.demo_picture

# rich alone, at the version of the extra `docs` in pyproject.toml.
build/docs/ready: | testhost
	@$(PYTHON) -m venv build/docs
	@build/docs/bin/pip install -q --disable-pip-version-check 'rich==15.0.0'
	@touch $@

# Style and types are checked while the tests begin, and the test host is built: mypy uses one core.
test: .venv/ready
	@.venv/bin/tox run-parallel --parallel all --parallel-live --parallel-no-spinner

unit integration lint type: .venv/ready
	@.venv/bin/tox run -e $@

# podman, crun, runc, CRIU, containerd and Python as the next Debian will have them.
test-sid: native
	@tests/host/host --suite sid build >/dev/null
	@$(PYTHON) -B tests/host/shards.py --suite sid

# The GPU in software, the launcher and inner loops in C, and stand-ins for plugins of CRIU's.
native:
	@$(MAKE) -s -C softgpu
	@$(MAKE) -s -C runtime_shim/launcher
	@$(MAKE) -s -C oci/chunks/native
	@$(MAKE) -s -C tests/plugin

# From the sdist, so that it has what it takes; with the launcher where there is a C compiler (setup.py).
wheel: build/packaging/ready
	@build/packaging/bin/python -m build --outdir dist .
	@rm -rf gpusnap.egg-info

build/packaging/ready:
	@$(PYTHON) -m venv build/packaging
	@build/packaging/bin/pip install -q --disable-pip-version-check 'build>=1'
	@touch $@

deb:
	@$(PYTHON) packaging/make_deb.py dist

# They take some minutes, and download what each tree needs.
test-packages: native testhost wheel deb .venv/ready
	@.venv/bin/tox run -e packages

docs: .venv/ready
	@.venv/bin/tox exec -q -e tests -- python -m tools.docs

site: .venv/ready
	@.venv/bin/tox run -e site

testhost:
	@tests/host/host build >/dev/null

# tox alone; it makes the environments of the tests.
.venv/ready:
	@tests/host/host tools
	@echo "make: setting up .venv"
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install -q --disable-pip-version-check 'tox>=4.11'
	@touch $@

# What gpusnap-runtime costs the commands that it passes on, in the test host.
bench-passthrough: native testhost
	@for runtime in crun runc; do tests/host/host enter -- sh -ec \
	  "cd /src; p='/opt/gpusnap/bin/python -B'; \$$p tests/host/shimhost.py $$runtime; \
	   \$$p bench/passthrough.py --runtime /usr/bin/$$runtime --shim /usr/local/bin/gpusnap-runtime -n 100" || exit 1; done

clean:
	@tests/host/host clean
	rm -rf "$${GPUSNAP_CACHE:-/var/cache/gpusnap}/packages"
	@$(MAKE) -s -C softgpu clean
	@$(MAKE) -s -C tests/plugin clean
	@$(MAKE) -s -C runtime_shim/launcher clean
	@$(MAKE) -s -C oci/chunks/native clean
	rm -rf .venv .tox build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find bench demo gpusnap hooks oci packaging runtime_shim tests tools -name __pycache__ -prune -exec rm -rf {} +
