//! Pushes: what a processor does in a second, and what is sent of a version in which little has changed.

use super::Bench;
use super::report::Figures;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use spillway_testkit::Rng;
use spillway_testkit::daemon::Daemon;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Chunks of the image, and those of which a second version changes 4 KiB: 1%.
const CHUNKS: u64 = 2048;
const CHANGED: u64 = CHUNKS / 100;
const NAME: &str = "random";

/// The row S10.
pub fn pushes(bench: &Bench, figures: &mut Figures) -> Result<()> {
    let folder = bench.site.path("pusher");
    let _ = fs::remove_dir_all(&folder);
    let hub = folder.join("hub");
    fs::create_dir_all(&hub)?;
    let daemon = Daemon::start(&bench.site.spillway, &folder, &[])?;
    daemon.ask(&["registry", "add", "hub", &format!("file://{}", hub.display())])?;
    let disk = folder.join("disk.raw");
    let file = File::create(&disk)?;
    let mut random = Rng::new(10);
    let mut chunk = vec![0; 1 << 20];
    for number in 0..CHUNKS {
        fill(&mut random, &mut chunk);
        file.write_all_at(&chunk, number << 20)?;
    }
    let push = |version: u32| -> Result<(Value, f64)> {
        daemon.ask(&["image", "import", NAME, &disk.display().to_string(), "--format", "raw"])?;
        let before = children_seconds(&daemon)?;
        let pushed = daemon.json(&["image", "push", &format!("{NAME}:{version}"), "hub"])?;
        Ok((pushed, children_seconds(&daemon)? - before))
    };
    let (_, seconds) = push(1)?;
    ensure!(seconds > 0.0, "the push took no processor time");
    let bytes = (CHUNKS << 20) as f64;
    figures.add(
        "S10/rate",
        "push to a folder of what cannot be compressed, for each second of a processor",
        "MB/s",
        bytes / 1e6 / seconds,
    );
    for n in 0..CHANGED {
        fill(&mut random, &mut chunk[..4096]);
        file.write_all_at(&chunk[..4096], (n * (CHUNKS / CHANGED)) << 20)?;
    }
    let before = chunk_files(&hub)?;
    push(2)?;
    figures.add("S10/changed", "chunks with a change in a second version", "", CHANGED as f64);
    figures.add("S10/sent", "chunks that its push sent", "", (chunk_files(&hub)? - before) as f64);
    Ok(())
}

fn fill(random: &mut Rng, bytes: &mut [u8]) {
    bytes.as_chunks_mut::<8>().0.iter_mut().for_each(|word| *word = random.next_u64().to_le_bytes());
}

/// Processor time of the daemon's children that have ended.
fn children_seconds(daemon: &Daemon) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", daemon.pid()))?;
    let fields: Vec<_> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    // proc(5): cutime and cstime are the fields 16 and 17, the one behind the name is the third.
    let ticks = |at: usize| fields.get(at - 3).and_then(|field| field.parse::<f64>().ok());
    let ticks = ticks(16).zip(ticks(17)).context("/proc/PID/stat has another form")?;
    Ok((ticks.0 + ticks.1) / rustix::param::clock_ticks_per_second() as f64)
}

fn chunk_files(hub: &Path) -> Result<usize> {
    let mut count = 0;
    for folder in fs::read_dir(hub.join("chunks"))? {
        count += fs::read_dir(folder?.path())?.count();
    }
    Ok(count)
}
