//! The program that serves disks, `spillway-worker`: where it is, and what it is started with.
//!
//! Invariant: it is never looked for by a name alone, so that nothing in PATH decides what serves a disk; and it is checked
//! before it is executed ([`check_program`]).

mod trust;

use crate::error::{ErrorKind, SupervisorError};
use crate::process::output_within;
use crate::settings::ServeSettings;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
pub use trust::{check_program, check_program_file};

/// The name of its file.
pub const WORKER: &str = "spillway-worker";
/// Where a package installs it.
pub const LIBEXEC: &str = match option_env!("SPILLWAY_LIBEXEC") {
    Some(folder) => folder,
    None => "/usr/lib/spillway",
};
/// Its argument: serve a disk, which the next one describes.
pub const SERVE: &str = "serve";
/// Its argument: say what there is on this host.
pub const PROBE: &str = "probe";
/// Version of [`ServeOrder`] and of the lines that the program prints in answer. It is raised with each new field and each new
/// word: a program that does not know a setting would serve the disk without it.
pub const ORDER_VERSION: u32 = 3;
/// What the refusal of an order of another version says.
pub const OTHER_VERSION: &str = "does not understand orders of version";
/// How long the program may take to say what there is on this host.
const PROBE_DEADLINE: Duration = Duration::from_secs(10);

/// What `spillway-worker serve` is to do: its one argument, as JSON, with the version of the order and of the program that gives
/// it beside these.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServeOrder {
    /// The disk.
    pub settings: ServeSettings,
    /// What it says on standard output.
    pub output: ServeOutput,
}

/// What is said on standard output while a disk is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServeOutput {
    /// A line for people when it is ready.
    Line,
    /// A [`Report`](crate::Report) as one line of JSON when it is ready.
    Report,
    /// The same, and [`Stats`](crate::Stats) as another line of JSON when it has ended.
    ReportAndStats,
}

/// What `spillway-worker probe` says, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// The program's version.
    pub version: String,
    /// Whether the I/O of files can be done by io_uring; if not, why.
    pub io_uring: Result<(), String>,
    /// Version of the kernel's Landlock; 0 for none.
    pub landlock: u32,
}

/// Who gives an order. Every program can read this part, whatever its version.
#[derive(Serialize, Deserialize)]
struct OrderedBy {
    order_version: u32,
    program_version: String,
}

/// Where the program is: beside the running program, as it is built, else where a package installs it.
pub fn find_worker_program() -> Result<PathBuf, SupervisorError> {
    let own = std::env::current_exe()
        .map_err(|e| SupervisorError::internal("cannot tell which program this is", e))?;
    let beside = own.parent().unwrap_or(Path::new("/"));
    let places = [beside, Path::new(LIBEXEC)];
    places.iter().map(|folder| folder.join(WORKER)).find(|path| path.is_file()).ok_or_else(|| {
        SupervisorError::new(
            ErrorKind::Unavailable,
            format!(
                "{WORKER}, the program that serves disks, is neither in {} nor in {LIBEXEC}: install the whole package, or \
                 build it with 'cargo build -p spillway-worker'",
                beside.display()
            ),
        )
    })
}

/// The program to execute: found and checked.
pub fn worker_program() -> Result<PathBuf, SupervisorError> {
    check_program(&find_worker_program()?)
}

impl ServeOrder {
    /// As arguments of the program.
    pub fn arguments(&self) -> Result<[String; 2], SupervisorError> {
        #[derive(Serialize)]
        struct Message<'a> {
            #[serde(flatten)]
            by: OrderedBy,
            #[serde(flatten)]
            order: &'a ServeOrder,
        }
        let by =
            OrderedBy { order_version: ORDER_VERSION, program_version: env!("CARGO_PKG_VERSION").into() };
        let order = serde_json::to_string(&Message { by, order: self }).map_err(|e| {
            let advice = "give files and sockets names that are UTF-8";
            SupervisorError::caused(ErrorKind::Options, "this disk cannot be described", e, advice)
        })?;
        Ok([SERVE.into(), order])
    }

    /// Reads the argument. `None`: it is no order. An order of another version is an error, whatever else is in it.
    pub fn parse(argument: &str) -> Result<Option<ServeOrder>, SupervisorError> {
        let Ok(by) = serde_json::from_str::<OrderedBy>(argument) else { return Ok(None) };
        if by.order_version != ORDER_VERSION {
            let own = std::env::current_exe().unwrap_or_else(|_| WORKER.into());
            let message = format!(
                "{}, which is of version {}, {OTHER_VERSION} {} (their format is {}, its own {ORDER_VERSION}): install \
                 spillway, spillwayd and {WORKER} of one version, and restart spillwayd if it has run since before that",
                own.display(),
                env!("CARGO_PKG_VERSION"),
                by.program_version,
                by.order_version,
            );
            return Err(SupervisorError::new(ErrorKind::Unavailable, message));
        }
        serde_json::from_str(argument).map(Some).map_err(|e| {
            let advice = "start disks by spillway or spillwayd";
            SupervisorError::caused(ErrorKind::Options, "this order describes no disk", e, advice)
        })
    }
}

/// The command that serves a disk.
pub fn serve_command(order: &ServeOrder) -> Result<Command, SupervisorError> {
    let mut command = Command::new(worker_program()?);
    command.args(order.arguments()?);
    Ok(command)
}

/// Asks the program what there is on this host.
pub fn probe() -> Result<Probe, SupervisorError> {
    let mut command = Command::new(worker_program()?);
    command.arg(PROBE);
    ask_probe(command, PROBE_DEADLINE)
}

fn ask_probe(mut command: Command, deadline: Duration) -> Result<Probe, SupervisorError> {
    let at = command.get_program().to_string_lossy().into_owned();
    let (kind, advice) = (ErrorKind::Unavailable, "install the whole package again");
    let done = output_within(command.stdin(Stdio::null()), deadline).map_err(|e| {
        SupervisorError::caused(kind, format!("{at}: it cannot be asked what it is"), e, advice)
    })?;
    serde_json::from_slice(&done.stdout).map_err(|e| {
        let what = format!("{at}: it has ended with {}, and what it says cannot be read", done.status);
        SupervisorError::caused(kind, what, e, advice)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use spillway_layout::{BaseCache, FullPolicy, ImageFormat, Mode};
    use std::time::Instant;

    fn order() -> ServeOrder {
        let digests = crate::settings::Digests { list: "l".into(), root: "r".into() };
        let streamed = crate::settings::Streamed { socket: "s".into(), digest: "d".into() };
        let console = crate::console::ConsoleSockets { clients: "c".into(), vmm: "v".into() };
        let settings = ServeSettings {
            digests: Some(digests),
            streamed: Some(streamed),
            console: Some(console),
            ..ServeSettings::default()
        };
        ServeOrder { settings, output: ServeOutput::Report }
    }

    #[test]
    fn an_order_is_read_as_it_was_given() {
        let [serve, argument] = order().arguments().unwrap();
        assert_eq!(serve, SERVE);
        assert_eq!(ServeOrder::parse(&argument).unwrap(), Some(order()));
        assert_eq!(ServeOrder::parse("{}").unwrap(), None);
    }

    #[test]
    fn an_order_of_another_version_is_refused_whatever_is_in_it() {
        for other in [ORDER_VERSION - 1, ORDER_VERSION + 1] {
            let argument = format!(
                "{{\"order_version\":{other},\"program_version\":\"9.8.7\",\"settings\":[],\"more\":1}}"
            );
            let error = ServeOrder::parse(&argument).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Unavailable);
            let (own, text) = (std::env::current_exe().unwrap(), error.to_string());
            for word in [
                own.to_str().unwrap(),
                env!("CARGO_PKG_VERSION"),
                &format!("{OTHER_VERSION} 9.8.7"),
                "restart spillwayd",
            ] {
                assert!(text.contains(word), "'{word}' is not in: {text}");
            }
        }
    }

    /// A field or a word that the list does not have needs another version: raise [`ORDER_VERSION`] and write the new list.
    #[test]
    fn the_version_is_raised_with_each_field_and_each_word() {
        fn fields(at: &str, value: &Value, all: &mut Vec<String>) {
            match value {
                Value::Object(map) => map.iter().for_each(|(name, inner)| fields(name, inner, all)),
                _ => all.push(at.to_owned()),
            }
        }
        let mut all = Vec::new();
        fields("", &serde_json::from_str(&order().arguments().unwrap()[1]).unwrap(), &mut all);
        all.sort();
        all.extend(Mode::ALL.map(|mode| mode.name().to_owned()));
        all.extend(FullPolicy::ALL.map(|policy| policy.name().to_owned()));
        all.extend(BaseCache::ALL.map(|cache| cache.name().to_owned()));
        all.extend([ImageFormat::Raw, ImageFormat::Qcow2].map(|format| word(&format)));
        all.extend([ServeOutput::Line, ServeOutput::Report, ServeOutput::ReportAndStats].map(|o| word(&o)));
        assert_eq!((ORDER_VERSION, all.join(" ").as_str()), (3, KNOWN));
    }

    const KNOWN: &str = "bandwidth_burst_bytes bandwidth_bytes base_cache base_model clients control critical_at digest disk format full \
        identity image image_id iops iops_burst list mode nbd order_version output overflow_bytes \
        overflow_dir overflow_model program_version queues ram_bytes root size_bytes socket socket_group \
        socket_mode vhost_user vmm warn_at ram+overflow ram overflow direct persistent ephemeral pause fail host \
        none raw qcow2 line report report-and-stats";

    fn word(value: &impl Serialize) -> String {
        serde_json::to_value(value).unwrap().as_str().unwrap().to_owned()
    }

    #[test]
    fn a_program_that_hangs_or_never_stops_talking_is_given_up() {
        let probe = |script: &str, deadline| {
            let mut program = Command::new("sh");
            program.args(["-c", script]);
            let begun = Instant::now();
            let text = ask_probe(program, deadline).unwrap_err().to_string();
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}: {text}", begun.elapsed());
            text
        };
        // What it has started holds its standard output open, too.
        let hangs = probe("sleep 1000 & sleep 1000", Duration::from_millis(100));
        assert!(hangs.starts_with("sh: ") && hangs.contains("not done in"), "{hangs}");
        let closes = probe("exec >&- 2>&-; sleep 1000", Duration::from_millis(100));
        assert!(closes.contains("not done in"), "{closes}");
        let talks = probe("exec yes", Duration::from_secs(30));
        assert!(talks.contains("more than"), "{talks}");
        let other = probe("echo '{}'", Duration::from_secs(30));
        assert!(other.contains("cannot be read"), "{other}");
    }
}
