//! A machine on a host that never had its image: beside one whose image lies on the host, the first time ever, and with the boot
//! set that earlier boots left in the registry.

use super::Bench;
use super::host::{Boot, CATALOG, Host, HostSettings, IMAGE};
use super::report::Figures;
use super::site::IMAGE_BYTES;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use spillway_testkit::store_proxy::StoreFigures;
use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

/// Boots after which a boot set is shared.
const RECORDED: usize = 2;
const MACHINE: &str = "desk-001";

/// The rows S1 and S2.
pub fn boots(bench: &Bench, figures: &mut Figures) -> Result<()> {
    let local = local_boot(bench)?;
    figures.add("S1/local/running", "a local image: start of a VMM", "s", local.running);
    figures.add("S1/local/ready", "a local image: ready", "s", local.ready);

    let set = bench.boot_set_file();
    let aside = set.as_ref().map(|file| (file.clone(), file.with_extension("aside")));
    if let Some((file, aside)) = &aside {
        fs::rename(file, aside)?;
    }
    let (first, import, _) = streamed_boot(bench, "lazy")?;
    if let Some((file, aside)) = &aside {
        fs::rename(aside, file)?;
    }
    figures.add("S1/first/import", "first time ever: import of the version", "s", import);
    figures.add("S1/first/running", "first time ever: start of a VMM", "s", first.running);
    figures.add("S1/first/ready", "first time ever: ready", "s", first.ready);
    if aside.is_none() {
        record(bench)?;
    }

    let chunks = bench.boot_set()?;
    let (boot, import, asked) = streamed_boot(bench, "boot")?;
    figures.add("S1/set/import", "with a boot set: import of the version", "s", import);
    figures.add("S1/set/running", "with a boot set: start of a VMM", "s", boot.running);
    figures.add("S1/set/ready", "with a boot set: ready", "s", boot.ready);

    let gets = chunk_gets(&asked);
    figures.add("S2/set", "chunks of the boot set", "MiB", chunks.len() as f64);
    figures.add("S2/boot", "chunks that the boot had from the store", "MiB", gets as f64);
    figures.add(
        "S2/sent",
        "bytes that the store sent for them",
        "MiB",
        asked.sent_bytes as f64 / f64::from(1 << 20),
    );
    figures.add(
        "S2/share",
        "the boot's chunks, of the image",
        "%",
        gets as f64 * 1e2 / (IMAGE_BYTES >> 20) as f64,
    );
    Ok(())
}

/// GETs of chunks.
pub fn chunk_gets(figures: &StoreFigures) -> u64 {
    figures.gets.iter().filter(|(path, _)| path.contains("chunks/")).map(|(_, count)| count).sum()
}

impl Bench<'_> {
    /// The object with the boot sets of the Debian image, if it is there.
    fn boot_set_file(&self) -> Option<PathBuf> {
        let images = fs::read_dir(self.site.hub().join("images")).ok()?;
        images.flatten().map(|entry| entry.path().join("boot.json")).find(|file| file.is_file())
    }

    /// Chunks that a boot reads and that are not zeroes, in the order of their first use.
    pub fn boot_set(&self) -> Result<Vec<u64>> {
        if self.boot_set_file().is_none() {
            record(self)?;
        }
        let file = self.boot_set_file().context("no boot set was recorded")?;
        let sets: Value = serde_json::from_slice(&fs::read(file)?)?;
        let chunks = sets["catalogs"][CATALOG].as_array().context("the catalog has no boot set")?;
        let is_data = |chunk: &u64| self.data.binary_search(chunk).is_ok();
        let chunks: Vec<_> = chunks.iter().filter_map(Value::as_u64).filter(is_data).collect();
        ensure!(!chunks.is_empty(), "the boot set is empty");
        Ok(chunks)
    }

    /// How many different contents these chunks have: so many objects a registry has for them.
    pub fn distinct(&self, chunks: &[u64]) -> Result<u64> {
        let file = File::open(&self.disk)?;
        let mut contents = HashSet::new();
        for chunk in chunks {
            let mut bytes = vec![0; 1 << 20];
            file.read_exact_at(&mut bytes, chunk << 20)?;
            contents.insert(bytes);
        }
        Ok(contents.len() as u64)
    }
}

/// A machine on a host that has the whole image, in memory as it was just written.
fn local_boot(bench: &Bench) -> Result<Boot> {
    let host = Host::new(&bench.site, HostSettings::default())?;
    let disk = bench.disk.display().to_string();
    host.daemon().ask(&["image", "import", IMAGE, &disk, "--format", "raw"])?;
    host.create_catalog(&bench.site, CATALOG, 1)?;
    host.boot(MACHINE)
}

/// A machine on a host that has nothing. Also how long its import took, and what the store was asked for until it was ready.
fn streamed_boot(bench: &Bench, residency: &str) -> Result<(Boot, f64, StoreFigures)> {
    let host = Host::new(&bench.site, HostSettings::default())?;
    bench.site.store.clear_figures();
    let import = host.import(IMAGE, residency)?;
    host.create_catalog(&bench.site, CATALOG, 1)?;
    let boot = host.boot(MACHINE)?;
    Ok((boot, import, bench.site.store.figures()))
}

/// Has boots recorded by a host that may write to the registry.
fn record(bench: &Bench) -> Result<()> {
    let host = Host::new(&bench.site, HostSettings::default())?;
    host.daemon().ask(&["registry", "add", "hub", &format!("file://{}", bench.site.hub().display())])?;
    let from = format!("hub/{IMAGE}");
    host.daemon().ask(&["image", "import", IMAGE, "--from", &from, "--residency", "lazy"])?;
    host.create_catalog(&bench.site, CATALOG, 1)?;
    for _ in 0..RECORDED {
        host.boot(MACHINE)?;
        host.daemon().ask(&["machine", "stop", MACHINE, "--force", "--wait"])?;
    }
    let shared = spillway_testkit::process::wait_until(Duration::from_secs(30), || bench.boot_set_file());
    shared.map(drop).context("the registry has no boot set after two boots")
}
