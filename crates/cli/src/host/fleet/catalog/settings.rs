//! Options of `spillway fleet catalog create`: those of `spillway catalog create`, and how machines are spread over hosts.
//!
//! Invariant: a setting without an option has its default.

use super::{FLEET, dry, path, show};
use crate::error::Failure;
use crate::host::Daemon;
use crate::host::catalog::settings::Create;
use crate::host::words::{label, number, words};
use crate::output;
use clap::Args;
use spillway_api::bounds::LOST_AFTER_SECONDS;
use spillway_api::client::Client;
use spillway_api::{
    FleetCatalog, FleetCatalogSpec, FleetSettings, IdentityKind, IsolationAction, Name, Spread, Wave, bounds,
    parse_seconds,
};
use std::time::{Duration, Instant};

/// How machines are distributed.
pub const SPREADS: &[&str] = &["even", "pack"];
/// What names of machines belong to.
pub const IDENTITIES: &[&str] = &["any", "named"];
/// What happens to named machines of an isolated host.
pub const ISOLATION_ACTIONS: &[&str] = &["keep", "pause", "stop"];

/// Options of `fleet catalog create`.
#[derive(Debug, Args)]
pub struct FleetCreate {
    /// Settings that a catalog of a host has, too.
    #[command(flatten)]
    create: Create,
    /// Settings that only catalogs of fleets have.
    #[command(flatten)]
    fleet: FleetOptions,
}

/// Settings that only catalogs of fleets have.
#[derive(Debug, Args)]
#[command(next_help_heading = "Options of fleets")]
pub struct FleetOptions {
    /// Which host of a zone gets the next machine: even (the one with most memory left) or pack (the one with least that has enough).
    /// Zones get equally many
    #[arg(long, value_name = "HOW", value_parser = words::<Spread>(SPREADS), default_value = "even")]
    spread: Spread,
    /// Zone whose hosts may have machines; may be given more than once [default: all]
    #[arg(long = "zone", value_name = "ZONE")]
    zones: Vec<Name>,
    /// Label that a host needs to have machines (--label of its spillwayd); may be given more than once
    #[arg(long = "host-label", value_name = "KEY=VALUE", value_parser = label)]
    host_labels: Vec<(Name, String)>,
    /// any: machines have names of their hosts, and are replaced by others. named: each has a name of the fleet, which is alive on
    /// one host at a time
    #[arg(long, value_name = "WHOSE", value_parser = words::<IdentityKind>(IDENTITIES), default_value = "any")]
    identity: IdentityKind,
    #[arg(
        long, value_name = "TIME", value_parser = lost_after, default_value = "45s",
        help = LOST_AFTER_SECONDS.help("Time since the last sign of life of a host after which its machines are replaced, such as 45s or 5m")
    )]
    lost_after: u32,
    /// What a host without connection to the fleet does with its named machines: keep, pause or stop. Those that are kept are not
    /// replaced elsewhere
    #[arg(long, value_name = "ACTION", value_parser = words::<IsolationAction>(ISOLATION_ACTIONS), default_value = "keep")]
    on_isolation: IsolationAction,
    #[arg(
        long, value_name = "N", default_value_t = 0, value_parser = number(&bounds::MACHINES),
        help = bounds::MACHINES.help("Machines on all hosts together that stay ready during a rollout")
    )]
    min_ready: u32,
    /// Hosts that have a new version after each wave of a rollout: numbers, or parts of those that have machines of the catalog [default: 1,10%,50%,100%]
    #[arg(long, value_name = "WAVE,...", value_delimiter = ',')]
    waves: Vec<Wave>,
}

/// Parses the time after which a host counts as lost.
fn lost_after(text: &str) -> Result<u32, String> {
    let seconds = parse_seconds(text)?;
    LOST_AFTER_SECONDS.check_value(seconds.into()).map(|()| seconds).map_err(|e| e.to_string())
}

impl FleetCreate {
    /// Makes it.
    pub fn run(self, daemon: &Daemon, client: &Client) -> Result<(), Failure> {
        let dry_run = self.create.dry_run();
        let fleet = self.fleet.settings();
        let new = self.create.request(|catalog| FleetCatalogSpec { catalog, fleet })?;
        let created: FleetCatalog = client.post(&format!("{FLEET}/catalogs{}", dry(dry_run)), &new)?;
        if dry_run && !daemon.json {
            return output::print(&format!("{} can be made\n", new.name)).map(drop);
        }
        show(daemon, client, &placed(client, created)?)
    }
}

/// Longest wait until the host that places has looked at a new catalog.
const LOOKED_AT: Duration = Duration::from_secs(3);

/// The catalog once it is placed, or once it is known why it is not.
fn placed(client: &Client, mut catalog: FleetCatalog) -> Result<FleetCatalog, Failure> {
    let begun = Instant::now();
    while catalog.unplaced > 0 && catalog.unplaced_because.is_empty() && begun.elapsed() < LOOKED_AT {
        std::thread::sleep(Duration::from_millis(100));
        catalog = client.get(&path(&catalog.name))?;
    }
    Ok(catalog)
}

impl FleetOptions {
    fn settings(self) -> FleetSettings {
        let waves = if self.waves.is_empty() { FleetSettings::default().waves } else { self.waves };
        FleetSettings {
            spread: self.spread,
            zones: self.zones,
            host_labels: self.host_labels.into_iter().collect(),
            identity: self.identity,
            lost_after_seconds: self.lost_after,
            on_isolation: self.on_isolation,
            min_ready: self.min_ready,
            waves,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Cli;
    use clap::error::ErrorKind;
    use clap::{FromArgMatches, Parser};

    fn settings(options: &[&str]) -> Result<FleetSettings, clap::Error> {
        let command = FleetCreate::augment_args(clap::Command::new("create"));
        let words = ["create", "desk", "--image", "debian"].iter().chain(options);
        let matches = command.try_get_matches_from(words)?;
        Ok(FleetCreate::from_arg_matches(&matches)?.fleet.settings())
    }

    #[test]
    fn options_are_settings_and_none_are_defaults() {
        assert_eq!(settings(&[]).unwrap(), FleetSettings::default());
        let given = settings(&[
            "--spread",
            "pack",
            "--zone",
            "a",
            "--zone",
            "b",
            "--host-label",
            "gpu=yes",
            "--identity",
            "named",
            "--lost-after",
            "5m",
            "--on-isolation",
            "stop",
            "--min-ready",
            "8",
            "--waves",
            "1,25%,100%",
        ]);
        let text = r#"{"spread": "pack", "zones": ["a", "b"], "host_labels": {"gpu": "yes"}, "identity": "named",
            "lost_after_seconds": 300, "on_isolation": "stop", "min_ready": 8, "waves": ["1", "25%", "100%"]}"#;
        assert_eq!(given.unwrap(), serde_json::from_str(text).unwrap());
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for options in [
            &["--spread", "wide"][..],
            &["--lost-after", "45"],
            &["--lost-after", "1s"],
            &["--waves", "0"],
            &["--zone", "A"],
            &["--host-label", "gpu"],
        ] {
            assert!(settings(options).is_err(), "{options:?}");
        }
    }

    #[test]
    fn an_option_beside_a_file_is_refused() {
        let of_fleets = ["--spread=pack", "--waves=1", "--zone=a"];
        for command in [&["fleet", "catalog"][..], &["catalog"]] {
            let parse = |option: Option<&str>| {
                let words = ["spillway"].iter().chain(command).chain(&["create", "-f", "desk.toml"]).copied();
                Cli::try_parse_from(words.chain(option)).map(drop)
            };
            parse(None).unwrap();
            parse(Some("--dry-run")).unwrap();
            let own = of_fleets.into_iter().filter(|_| command[0] == "fleet");
            for option in
                ["--count=5", "--ram=1G", "--vcpus=2", "--iops=9", "--label=a=b"].into_iter().chain(own)
            {
                let refused = parse(Some(option)).unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::ArgumentConflict, "{option}");
            }
        }
    }
}
