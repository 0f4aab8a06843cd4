//! `spillwayd`: keeps images, catalogs and machines of a host.

use anyhow::{Context, Result};
use clap::builder::{OsStringValueParser, PossibleValuesParser, TypedValueParser};
use clap::{CommandFactory, Parser, Subcommand};
use spillway_api::Hypervisor;
use spillway_api::client::Address;
use spillway_control::kvm::Accelerator;
use spillway_control::man_page;
use spillway_control::output::in_one_line;
use spillway_control::program::{LIBEXEC, WORKER, find_worker_program};
use spillway_host::access::tls::Remote;
use spillway_host::backup;
use spillway_host::daemon::{self, AuditTo, DaemonSettings, LIBVIRT_URI_DEFAULT};
use spillway_host::events::log_line;
use spillway_host::failure::{self, Failure};
use spillway_host::fleet::{FleetOptions, accept_restored_fleet, leave_fleet};
use spillway_host::guard;
use spillway_host::guest_users::UserChoice;
use spillway_host::registries::SourceRule;
use spillway_host::streaming::PeerOptions;
use spillway_host::systemd::ServiceManager;
use std::ffi::OsString;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Below its options.
const MORE: &str = "\
Examples:
  With all files in one folder, started by hand:
    spillwayd --state /srv/spillway --socket /srv/spillway/sock
    SPILLWAY_SOCKET=/srv/spillway/sock spillway store list
  Also over TCP, for clients with a token:
    spillway token new --role operate ci
    spillwayd --listen 192.0.2.1:9443 --tls-cert cert.pem \\
        --tls-key key.pem --tokens /etc/spillway/tokens

SIGTERM and SIGINT end spillwayd, not the machines: the next spillwayd
adopts those that run. SIGHUP reloads the files of --tokens, --tls-cert
and --tls-key only. spillwayd stays in the foreground; the package's
service is spillwayd.service. Sizes are binary, such as 512M or 16G.

Files:
  DIR/audit.log           audit log: who requested which change; rotated
                          files have the time in their names
  DIR/events              events of the last week
  DIR/run/machines/NAME   sockets and logs of a running machine
  DIR/state.db            records: images, catalogs, machines, claims
  DIR/store               the first store of images and disks
  /etc/default/spillwayd  options of the service

See also: spillway(1), and /usr/share/doc/spillway/docs/SUMMARY.md.";

/// Below the options of `backup` and `restore`.
const BACKUP: &str = "\
A backup contains all records (DIR/state.db): images and their versions, catalogs,
machines with their identities, SSH host keys and desired state, claims, stores, and
the list of files of deleted machines. It contains secrets, and has mode 0600.
Back up separately: the files of stores (images, disks of dedicated machines, data
disks), tokens and certificates, /etc/default/spillwayd.
Not needed: DIR/run, DIR/events, DIR/audit.log.

Examples:
  spillwayd backup /backup/spillway.db
  spillwayd restore /backup/spillway.db --state /var/lib/spillway";

/// The accelerator to use; `None`: decided by a test guest.
#[derive(Clone)]
struct AcceleratorChoice(Option<Accelerator>);

/// Manages the images, catalogs and machines of a host, and runs the machines
#[derive(Parser)]
#[command(name = "spillwayd", version, about, after_help = MORE)]
struct Arguments {
    /// State folder: records, images, disks
    #[arg(long, value_name = "DIR", default_value = "/var/lib/spillway", global = true)]
    state: PathBuf,
    /// Path of the unix socket to listen on
    #[arg(long, value_name = "SOCK", env = spillway_api::SOCKET_VARIABLE, default_value = spillway_api::DEFAULT_SOCKET, value_parser = socket(), global = true)]
    socket: PathBuf,
    /// Permissions of the socket, octal
    #[arg(long, value_name = "MODE", default_value = "0600", value_parser = octal)]
    socket_mode: u32,
    /// Also listen on this TCP address, with TLS, for clients with a token; the console is at /console/ there
    #[arg(long, value_name = "ADDR:PORT", requires_all = ["tls_cert", "tls_key", "tokens"])]
    listen: Option<SocketAddr>,
    /// With --listen: file with the server's certificate chain (PEM)
    #[arg(long, value_name = "FILE", requires = "listen")]
    tls_cert: Option<PathBuf>,
    /// With --listen: file with the certificate's private key (PEM)
    #[arg(long, value_name = "FILE", requires = "listen")]
    tls_key: Option<PathBuf>,
    /// With --listen: file with the accepted tokens, one line for each as 'spillway token new' prints it
    #[arg(long, value_name = "FILE", requires = "listen")]
    tokens: Option<PathBuf>,
    /// What runs the machines: qemu (spillwayd starts QEMU), libvirt (libvirt starts QEMU) or none (spillwayd serves disks
    /// only, for VMMs that other programs start)
    #[arg(long, value_name = "WHO", value_parser = hypervisor(), default_value = "qemu")]
    hypervisor: Hypervisor,
    /// With --hypervisor libvirt: URI of the libvirt daemon on this host
    #[arg(long, value_name = "URI", default_value = LIBVIRT_URI_DEFAULT)]
    libvirt_uri: String,
    /// How guests run: kvm (in hardware), tcg (in software, many times slower) or auto (KVM, if a test guest runs with it)
    #[arg(long, value_name = "HOW", value_parser = accelerator(), default_value = "auto")]
    accelerator: AcceleratorChoice,
    /// Range of user IDs for QEMU, one for each machine; no other program may use them. none: QEMU runs as spillwayd's user
    /// [default: 2100000000-2100065535 if spillwayd is root]
    #[arg(long, value_name = "FIRST-LAST|none", value_parser = str::parse::<UserChoice>)]
    guest_users: Option<UserChoice>,
    /// Path of the program that serves disks [default: spillway-worker beside this one, or in /usr/lib/spillway]
    #[arg(long, value_name = "PATH")]
    worker: Option<PathBuf>,
    /// Memory for the write caches of all machines together [default: half of the host's]
    #[arg(long, value_name = "SIZE", value_parser = spillway_api::parse_size)]
    ram_budget: Option<u64>,
    /// Largest sum of the write caches' limits, in percent of --ram-budget. The sum of their guarantees is at most 100
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(100..=10_000), default_value_t = 100)]
    overcommit: u32,
    /// Memory of the host that is not given to guests and caches [default: a tenth of the host's]
    #[arg(long, value_name = "SIZE", value_parser = spillway_api::parse_size)]
    memory_reserve: Option<u64>,
    /// Largest sum of the guests' memory and the caches' limits, in percent of the memory that --memory-reserve leaves. Above
    /// 100 the host may swap, or kill guests, if they use all that they were given
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(100..=10_000), default_value_t = 100)]
    memory_overcommit: u32,
    /// Largest sum of the guests' processors, in percent of the host's
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(100..=10_000), default_value_t = 800)]
    vcpu_overcommit: u32,
    /// Number of machines that boot at the same time, 0: no limit; others wait for their turn [default: 2 for each processor of the
    /// host, 4 at least]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1000))]
    boots_at_once: Option<u32>,
    /// With --boots-at-once: seconds after which a machine that is not ready yet counts no longer
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=3600), default_value_t = 180)]
    boot_patience: u32,
    /// Address and port of this host to which machines in bridges send a POST when they are ready ('ready = phone-home'). Without
    /// it such catalogs are refused
    #[arg(long, value_name = "ADDR:PORT", value_parser = own_address)]
    phone_home: Option<SocketAddr>,
    /// When less memory than this is available, caches shrink towards their guarantees [default: a twentieth of the host's]
    #[arg(long, value_name = "SIZE", value_parser = spillway_api::parse_size)]
    memory_floor: Option<u64>,
    /// Duration of a claim if neither the claim nor its catalog gives one, such as 30m, 8h or 7d; none: until it is released
    #[arg(long, value_name = "TIME", value_parser = spillway_api::parse_ttl, default_value = "24h")]
    claim_ttl: u32,
    /// Destination of the audit log: 'journal' (standard error) or a file; give the option twice for both [default:
    /// DIR/audit.log]
    #[arg(long, value_name = "journal|FILE", value_parser = audit())]
    audit: Vec<AuditTo>,
    /// How many days the audit log is kept
    #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(u32).range(1..=36_500), default_value_t = 365)]
    audit_days: u32,
    /// Largest size of the audit log, at least 1M: the oldest files are deleted
    #[arg(long, value_name = "SIZE", value_parser = audit_size, default_value = "1G")]
    audit_size: u64,
    /// Folder of the cache in which chunks of streamed images are kept, and that is used for nothing else [default: DIR/cache]
    #[arg(long, value_name = "PATH")]
    stream_cache: Option<PathBuf>,
    /// Largest size of that cache. When it is full, chunks of images that no disk uses are removed; if there are none, new chunks
    /// are used and not kept
    #[arg(long, value_name = "SIZE", value_parser = spillway_api::parse_size, default_value = "20G")]
    stream_cache_size: u64,
    /// Bytes a second at which the chunks of images with residency full are brought
    #[arg(long, value_name = "SIZE", value_parser = spillway_api::parse_size, default_value = "50M")]
    stream_fill_rate: u64,
    #[command(flatten)]
    peers: PeerOptions,
    #[command(flatten)]
    fleet: FleetOptions,
    /// Host that 'image import' may download from: HOST, HOST:PORT, http://HOST or http://HOST:PORT for one without TLS, or '*' for any host with
    /// a public address. Add ',local' for a host with a loopback or link-local address. May be repeated [default: none]
    #[arg(long, value_name = "RULE")]
    import_from: Vec<SourceRule>,
    /// Print the OpenAPI description of the HTTP API and exit
    #[arg(long)]
    print_openapi: bool,
    /// Print the manual page (roff) and exit
    #[arg(long)]
    print_man: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

/// What else there is to do with a state's folder
#[derive(Subcommand)]
enum Command {
    /// Let this host take part again in its fleet, whose etcd was restored from a backup, while no spillwayd uses the state folder. The host
    /// carries out what the restored records say
    AcceptRestoredFleet,
    /// Copy the records of a host into a file, while spillwayd runs or not
    #[command(after_help = BACKUP)]
    Backup {
        /// File to write; an existing file is replaced
        file: PathBuf,
    },
    /// End machines with names of a fleet in time; spillwayd starts this itself
    #[command(hide = true)]
    Guard {
        /// Folder of all machines
        machines: PathBuf,
        /// Where it says that it looks: 0, or 1 while it takes the place of another guard
        #[arg(long, default_value_t = 0)]
        slot: usize,
    },
    /// End the membership of this host in its fleet, while no spillwayd uses the state folder. Catalogs of the fleet become the host's own
    LeaveFleet,
    /// Restore the records of a backup into a state folder without records, while no spillwayd uses it
    #[command(after_help = BACKUP)]
    Restore {
        /// File that 'spillwayd backup' has written
        file: PathBuf,
    },
}

/// A path: those who ask may have the address of another host in the same variable.
fn socket() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().try_map(|text: OsString| match Address::parse(&text) {
        Ok(Address::Socket(path)) => Ok(path),
        _ => Err("--socket takes the path of a unix socket; use --listen for TCP"),
    })
}

fn audit() -> impl TypedValueParser<Value = AuditTo> {
    OsStringValueParser::new().map(|text: OsString| match text == "journal" {
        true => AuditTo::Journal,
        false => AuditTo::File(text.into()),
    })
}

fn audit_size(text: &str) -> Result<u64, String> {
    let bytes = spillway_api::parse_size(text).map_err(|e| e.to_string())?;
    if bytes < 1 << 20 { Err("the audit log needs at least 1M".into()) } else { Ok(bytes) }
}

/// An address that is told to guests.
fn own_address(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr = text.parse().map_err(|_| "an address and a port, such as 192.0.2.1:8080")?;
    match address.ip().is_unspecified() || address.port() == 0 {
        true => Err("guests are told this address: it cannot be any address, nor any port".into()),
        false => Ok(address),
    }
}

fn octal(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| "permissions are octal, such as 0660".into())
}

fn hypervisor() -> impl TypedValueParser<Value = Hypervisor> {
    PossibleValuesParser::new(["qemu", "libvirt", "none"]).map(|word| match word.as_str() {
        "qemu" => Hypervisor::Qemu,
        "libvirt" => Hypervisor::Libvirt,
        _ => Hypervisor::None,
    })
}

fn accelerator() -> impl TypedValueParser<Value = AcceleratorChoice> {
    PossibleValuesParser::new(["auto", "kvm", "tcg"]).map(|word| {
        AcceleratorChoice(match word.as_str() {
            "auto" => None,
            "kvm" => Some(Accelerator::Kvm),
            _ => Some(Accelerator::Tcg("--accelerator tcg".into())),
        })
    })
}

/// Reports on standard output that the daemon is ready. An error is ignored: nobody may read it.
fn report_ready(place: &str) {
    use std::io::Write;
    let _ = writeln!(io::stdout(), "spillwayd: ready on {place}");
}

#[expect(unsafe_code, reason = "before there are threads")]
fn main() -> ExitCode {
    // SAFETY: nothing has been opened or begun yet.
    let service_manager = unsafe { ServiceManager::take() };
    let done = match Arguments::try_parse() {
        Err(help) if !help.use_stderr() => help.print().context("standard output"),
        Err(wrong) => Err(Failure::usage(in_one_line(&wrong.to_string())).into()),
        Ok(arguments) => execute(arguments, service_manager),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log_line(&format!("error: {error:#}"));
            ExitCode::from(failure::exit(&error) as u8)
        }
    }
}

/// Carries out what is done with a state folder instead of serving it.
fn execute_offline(command: &Command, state: &Path, socket: &Path) -> Result<()> {
    match command {
        Command::Backup { file } => {
            let done = backup::backup(state, socket, file)?;
            println!("{} records of {} are in {}", done.records, state.display(), file.display());
        }
        Command::Restore { file } => {
            let done = backup::restore(state, file)?;
            println!("{} records are in {} again: start spillwayd", done.records, state.display());
        }
        Command::LeaveFleet => match leave_fleet(state)? {
            Some(left) if left.catalogs.is_empty() => println!("this host has left the fleet {}", left.fleet),
            Some(left) => {
                let catalogs = left.catalogs.join(", ");
                println!("this host has left the fleet {}; its own from now on: {catalogs}", left.fleet);
            }
            None => println!("this host is in no fleet"),
        },
        Command::AcceptRestoredFleet => match accept_restored_fleet(state)? {
            Some(records) => {
                println!(
                    "this host takes the records of revision {} and later: start spillwayd",
                    records.found_revision
                );
            }
            None => {
                println!("this host has found no restored records of its fleet: there is nothing to accept")
            }
        },
        Command::Guard { machines, slot } => guard::run(machines, *slot)?,
    }
    Ok(())
}

fn execute(arguments: Arguments, service_manager: ServiceManager) -> Result<()> {
    if arguments.print_openapi {
        println!("{}", spillway_host::api::document());
        return Ok(());
    }
    if arguments.print_man {
        let page = clap_mangen::Man::new(Arguments::command()).section("8").manual("System administration");
        let mut text = Vec::new();
        page.render(&mut text)?;
        let text = man_page::with_sections(&String::from_utf8(text)?);
        return io::stdout().write_all(text.as_bytes()).context("standard output");
    }
    if let Some(command) = &arguments.command {
        return execute_offline(command, &arguments.state, &arguments.socket);
    }
    let upload = arguments.peers.upload_bytes_per_second();
    let fleet = arguments.fleet.settings(&arguments.state, upload)?;
    let peers = arguments.peers.order().context("--peer-listen")?;
    // Without one it serves what there is, and says that no machine can start.
    let program = arguments
        .worker
        .or_else(|| find_worker_program().ok())
        .unwrap_or_else(|| Path::new(LIBEXEC).join(WORKER));
    let remote = match (arguments.listen, arguments.tls_cert, arguments.tls_key, arguments.tokens) {
        (Some(address), Some(certificate), Some(key), Some(tokens)) => {
            Some(Remote { address, certificate, key, tokens })
        }
        _ => None,
    };
    if peers.is_some() && fleet.is_some() {
        let text =
            "--peer-listen: with --fleet, hosts exchange chunks without these options (--fleet-peer-listen)";
        return Err(Failure::usage(text).into());
    }
    let settings = DaemonSettings {
        remote,
        state: arguments.state,
        socket: arguments.socket,
        socket_mode: arguments.socket_mode,
        hypervisor: arguments.hypervisor,
        accelerator: arguments.accelerator.0,
        ram_budget_bytes: arguments.ram_budget,
        overcommit_percent: arguments.overcommit,
        memory_reserve_bytes: arguments.memory_reserve,
        memory_overcommit_percent: arguments.memory_overcommit,
        vcpu_overcommit_percent: arguments.vcpu_overcommit,
        boots_at_once: arguments.boots_at_once,
        phone_home: arguments.phone_home,
        boot_patience: Duration::from_secs(arguments.boot_patience.into()),
        memory_floor_bytes: arguments.memory_floor,
        libvirt_uri: arguments.libvirt_uri,
        audit: arguments.audit,
        audit_keep: Duration::from_secs(u64::from(arguments.audit_days) * 86_400),
        audit_max_bytes: arguments.audit_size,
        stream_cache: arguments.stream_cache,
        stream_cache_bytes: arguments.stream_cache_size,
        stream_fill_bytes_per_second: arguments.stream_fill_rate,
        peers,
        import_from: arguments.import_from,
        fleet,
        claim_ttl_seconds: Some(arguments.claim_ttl).filter(|ttl| *ttl > 0),
        guest_users: arguments.guest_users.unwrap_or(UserChoice::Usual),
        program: std::path::absolute(&program).context("--worker")?,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let socket = settings.socket.display().to_string();
    let done = runtime.block_on(daemon::run(settings, service_manager, move |remote| match remote {
        Some(address) => report_ready(&format!("{socket} and https://{address}")),
        None => report_ready(&socket),
    }));
    // Nothing is waited for: what goes on is undone by the next start.
    runtime.shutdown_background();
    done
}
