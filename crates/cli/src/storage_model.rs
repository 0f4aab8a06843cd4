//! `spillway storage-model`: devices as slow as others, for disks to be measured on. Owns how they are written down; what they
//! do is the worker's.
//!
//! Invariant: a model's file is there whole or not at all, and one that is there is replaced only with `--force`.

use crate::error::{Exit, Failure};
use crate::output;
use clap::Subcommand;
use serde_json::json;
use spillway_control::storage_model::{Model, NAMED, Parameters};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

const CREATE_EXAMPLES: &str = "\
Examples:
  spillway storage-model create hdd-seed-004 /dev/shm/hdd
  spillway serve --image debian.raw --overflow-model /dev/shm/hdd --base-model /dev/shm/hdd --base-cache none ...
  spillway storage-model create latency=2ms,iops=3000,bandwidth=125M /dev/shm/volume

A model of your own has these parts, each at most once. A part that is left out sets no limit:
  latency=TIME            time that each request takes, for any number of requests at once: us, ms or s
  seek=TIME               time before a request that does not begin where the last one ended, one request at a time
  iops=N                  limit of requests per second
  iops-burst=N            requests that may exceed the limit after an idle time
  iops-peak=N             limit of requests per second in such a burst [default: none]
  bandwidth=SIZE          limit of bytes per second
  bandwidth-burst=SIZE    bytes that may exceed the limit after an idle time (not with seek)
  bandwidth-peak=SIZE     limit of bytes per second in such a burst [default: none]

All disks with this file share the simulated device. Put the file on a tmpfs, such as /dev/shm: every request writes to
it.";

/// What to do with storage models.
#[derive(Debug, Subcommand)]
pub enum StorageModelCommand {
    /// Create a simulated device, for --overflow-model and --base-model of 'serve' and 'run'
    #[command(after_help = CREATE_EXAMPLES)]
    Create(Create),
    /// List the predefined models
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Options of `storage-model create`.
#[derive(Debug, clap::Args)]
pub struct Create {
    /// A name of 'storage-model list', or parts such as latency=2ms,iops=3000
    #[arg(value_parser = parameters)]
    model: Parameters,
    /// File to create, which must not exist
    file: PathBuf,
    /// Replace a file that exists; disks that are served continue to use the old one
    #[arg(long)]
    force: bool,
}

/// Does it.
pub fn storage_model(command: &StorageModelCommand) -> Result<(), Failure> {
    match command {
        StorageModelCommand::Create(args) => create(args),
        StorageModelCommand::List { json } => {
            output::print(&if *json { as_json() } else { as_table() }).map(drop)
        }
    }
}

fn create(args: &Create) -> Result<(), Failure> {
    let Create { model, file, force } = args;
    let failed = |e: &io::Error| {
        let what = match e.kind() {
            io::ErrorKind::AlreadyExists => "it exists: give another path, or replace it with --force".into(),
            _ => format!("cannot be made: {e}"),
        };
        Failure::new(Exit::Create, format!("{}: {what}", file.display()))
    };
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut whole = tempfile::NamedTempFile::new_in(folder).map_err(|e| failed(&e))?;
    whole.write_all(&Model::file(*model)).map_err(|e| failed(&e))?;
    let made = if *force { whole.persist(file) } else { whole.persist_noclobber(file) };
    made.map(drop).map_err(|e| failed(&e.error))
}

fn as_table() -> String {
    let width = NAMED.iter().map(|(name, ..)| name.len()).max().unwrap_or(0);
    NAMED.iter().map(|(name, what, _)| format!("{name:width$}  {what}\n")).collect()
}

fn as_json() -> String {
    let model = |(name, description, parameters): &(_, _, Parameters)| json!({ "name": name, "description": description, "parameters": parameters });
    let models: Vec<_> = NAMED.iter().map(model).collect();
    format!("{}\n", json!({ "models": models }))
}

/// A name, or parts.
fn parameters(text: &str) -> Result<Parameters, String> {
    if let Some((.., parameters)) = NAMED.iter().find(|(name, ..)| *name == text) {
        return Ok(*parameters);
    }
    if !text.contains('=') {
        let names: Vec<_> = NAMED.iter().map(|(name, ..)| *name).collect();
        return Err(format!("a model is {}, or parts such as latency=2ms,iops=3000", names.join(", ")));
    }
    let mut model = Parameters::default();
    let mut seen = Vec::new();
    for part in text.split(',') {
        let (name, value) = part.split_once('=').ok_or_else(|| format!("'{part}' is not NAME=VALUE"))?;
        let size = || spillway_api::parse_size(value).map_err(|e| format!("{name}: {e}"));
        let number = || value.parse().map_err(|_| format!("{name}: '{value}' is not a whole number"));
        let time = || time_ns(value).map_err(|e| format!("{name}: {e}"));
        let (to, value) = match name {
            "latency" => (&mut model.latency_ns, time()?),
            "seek" => (&mut model.seek_ns, time()?),
            "iops" => (&mut model.iops, number()?),
            "iops-burst" => (&mut model.iops_burst, number()?),
            "iops-peak" => (&mut model.iops_peak, number()?),
            "bandwidth" => (&mut model.bandwidth_bytes, size()?),
            "bandwidth-peak" => (&mut model.bandwidth_peak_bytes, size()?),
            "bandwidth-burst" => (&mut model.bandwidth_burst_bytes, size()?),
            _ => {
                return Err(format!(
                    "there is no '{name}': it is latency, seek, iops, iops-burst, iops-peak, bandwidth, bandwidth-burst or bandwidth-peak"
                ));
            }
        };
        if value == 0 || seen.contains(&name) {
            return Err(format!("{name} is named once, and is more than 0; leave it out to limit nothing"));
        }
        *to = value;
        seen.push(name);
    }
    if model.iops_burst > 0 && model.iops == 0 {
        return Err("iops-burst needs iops: name that too".into());
    }
    if model.bandwidth_burst_bytes > 0 && (model.bandwidth_bytes == 0 || model.seek_ns > 0) {
        return Err("bandwidth-burst needs bandwidth, and is not for a device that seeks".into());
    }
    if model.iops_peak > 0 && (model.iops_burst == 0 || model.iops_peak < model.iops)
        || model.bandwidth_peak_bytes > 0
            && (model.bandwidth_burst_bytes == 0 || model.bandwidth_peak_bytes < model.bandwidth_bytes)
    {
        return Err("a peak is the rate of a burst, how high a burst goes: name the burst too, and make the peak no less than the rate".into());
    }
    Ok(model)
}

fn time_ns(text: &str) -> Result<u64, String> {
    let units = [("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)];
    let found = units.iter().find_map(|(unit, ns)| Some((text.strip_suffix(unit)?, ns)));
    let digits = found.filter(|(number, _)| number.bytes().all(|b| b.is_ascii_digit()));
    let ns = digits.and_then(|(number, ns)| number.parse::<u64>().ok()?.checked_mul(*ns));
    ns.ok_or_else(|| "a time is a whole number and us, ms or s, such as 80us".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_a_name_or_parts_that_go_together() {
        assert_eq!(parameters("nvme").unwrap().latency_ns, 20_000);
        let all = "latency=80us,iops=500,iops-burst=3,iops-peak=700,bandwidth=100M,bandwidth-burst=1G,bandwidth-peak=170M";
        let expected = Parameters {
            latency_ns: 80_000,
            seek_ns: 0,
            bandwidth_bytes: 100 << 20,
            bandwidth_burst_bytes: 1 << 30,
            bandwidth_peak_bytes: 170 << 20,
            iops: 500,
            iops_burst: 3,
            iops_peak: 700,
        };
        assert_eq!(parameters(all), Ok(expected));
        assert_eq!(parameters("seek=2ms").unwrap().seek_ns, 2_000_000);
        for (bad, word) in [
            ("", "hdd-seed-004"),
            ("hdd", "hdd-seed-004"),
            ("latency=2", "us, ms or s"),
            ("latency=-2ms", "us, ms or s"),
            ("latency=99999999999999999999s", "us, ms or s"),
            ("iops=0", "more than 0"),
            ("iops=5,iops=6", "named once"),
            ("iops=5,", "NAME=VALUE"),
            ("iops=many", "not a whole number"),
            ("bandwidth=1GB", "binary"),
            ("rpm=7200", "there is no 'rpm'"),
            ("iops-burst=5", "name that too"),
            ("iops=5,iops-peak=9", "how high a burst goes"),
            ("iops=5,iops-burst=5,iops-peak=4", "no less than the rate"),
            ("seek=2ms,bandwidth=1M,bandwidth-burst=1M", "not for a device that seeks"),
        ] {
            assert!(parameters(bad).unwrap_err().contains(word), "{bad}");
        }
    }
}
