# Entry points. Each target says what it needs; `make install-deps` installs what is missing.
CARGO ?= cargo

.PHONY: help build deb docs demo studies test check check-fast bench soak install-deps image clean-cache

help: ## What there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

build: ## The programs, optimised, and their man pages: target/release/spillway, spillwayd, spillway-worker, spillway-streamd, spillway-lab, man1/ and man8/
	$(CARGO) build --release -p spillway -p spillway-worker -p spillway-host -p spillway-streamd -p spillway-lab --bin spillway --bin spillway-worker --bin spillwayd --bin spillway-streamd --bin spillway-lab
	target/release/spillway man target/release/man1
	mkdir -p target/release/man8 && target/release/spillwayd --print-man >target/release/man8/spillwayd.8

deb: build ## The Debian packages, of them, of the console's page in Cockpit and of the plugin for Proxmox VE: target/deb/spillway_VERSION_ARCH.deb, cockpit-spillway_VERSION_all.deb, libpve-storage-spillway_VERSION_all.deb
	scripts/deb
	scripts/deb-cockpit
	scripts/deb-proxmox

docs: ## The book as web pages, target/book/html, its links checked. The first time mdBook is built (some minutes; so CI checks links, and builds no pages)
	scripts/book

demo: install-deps image ## A machine of each of three catalogs, and where its I/O goes (DEMO_ARGS="--out FILE" keeps the figures)
	$(CARGO) build --release -p spillway -p spillway-worker -p spillway-host -p spillway-streamd -p spillway-lab
	target/release/demo $(DEMO_ARGS)

BENCH_PART ?= all
bench: install-deps ## Spillway beside its peers (BENCH_PART=first-minute|peers|cliff|scale|stream|all BENCH_ARGS="--quick --check --out DIR")
	$(CARGO) build --release -p spillway -p spillway-worker -p spillway-host -p spillway-streamd -p spillway-lab
	target/release/bench $(BENCH_PART) $(BENCH_ARGS)

STUDIES ?= seed-000 seed-001 seed-001-desktops seed-002 seed-002-iometer seed-003 seed-004 seed-004-boot
studies: install-deps image ## The studies in their quick forms, each with its report under target/studies (STUDIES="seed-000" STUDY_ARGS="--runs 5")
	$(CARGO) build --release -p spillway -p spillway-worker -p spillway-lab --bin spillway --bin spillway-worker --bin spillway-lab
	@worst=0; for study in $(STUDIES); do \
		echo "==== $$study"; rm -rf target/studies/$$study; \
		target/release/spillway lab run $$study --quick --out target/studies/$$study $(STUDY_ARGS) || worst=1; \
	done; exit $$worst

test: install-deps image ## All tests; says what was skipped
	scripts/test

check-fast: ## Before each commit, within 4 minutes: format, lints, walls, links, unit tests, a short run of the model
	scripts/check format clippy walls house quick

check: ## All that CI checks, every failure listed: format, lints, walls, docs, tests, fuzzing, audits
	scripts/check

soak: install-deps image ## The long forms: 200 million model operations, a crash at every store, 200 kills, 10 million requests of a Windows driver, fleets of 20, 20 minutes a fuzz target, whole studies
	scripts/soak

install-deps: ## Installs the Debian packages that are missing
	scripts/install-deps

image: ## The guests that tests and demo boot, kept under .cache
	@scripts/guest-image >/dev/null

clean-cache: ## Removes the kept guests
	rm -rf .cache
