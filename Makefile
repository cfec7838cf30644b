# gpusnap. On a fresh Debian 12 as root, with python3, make and apt, each target does its own set-up.
#
#   make demo    checkpoint and restore a GPU container with Podman; a real GPU if there is one, else one in software
#   make test    lint, types, unit tests, and integration tests in a Debian 13 test host
#   make test-sid   the integration tests with the next releases of everything, in a test host of Debian sid
#   make wheel   a wheel and an sdist, in dist/
#   make deb     a Debian package, in dist/
#   make test-packages   install these in clean trees of Debian 12, Debian 13 and Ubuntu 24.04, and use them there
#   make bench-passthrough   what the shim costs the commands that it only passes on
#   make site    the documentation as a site, in build/site
#   make demo-picture   docs/demo.svg, the picture of the demo in README.md, from a run of it
#   make clean   remove what these made, the test host included

PYTHON ?= python3

.PHONY: help site demo demo-picture test test-sid unit integration lint type native wheel deb test-packages testhost bench-passthrough clean
help:
	@sed -n '2,14s/^# \{0,1\}//p' Makefile

demo:
	@$(PYTHON) demo/demo.py

demo-picture: build/docs/ready
	@PYTHONDONTWRITEBYTECODE=1 build/docs/bin/python -m tools.docs.demo_picture

# rich alone, at the version of the extra `docs` in pyproject.toml.
build/docs/ready: | testhost
	@$(PYTHON) -m venv build/docs
	@build/docs/bin/pip install -q --disable-pip-version-check 'rich==15.0.0'
	@touch $@

test: .venv/ready testhost
	@.venv/bin/tox run

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

site: .venv/ready
	@.venv/bin/tox run -e site

testhost:
	@tests/host/host build >/dev/null

# tox alone; it makes the environments of the tests. The test host's set-up brings python3-venv where it is missing.
.venv/ready: | testhost
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
