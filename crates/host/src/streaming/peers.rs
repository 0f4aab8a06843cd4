//! Hosts that serve each other chunks of streamed images, as the options of the daemon name them. Owns the form of their addresses.
//!
//! Invariant: either all settings of peers are there, or none.

use clap::Args;
use spillway_registry::serve::{PeerOrder, PeerTrust};
use std::fs;
use std::net::{Ipv6Addr, SocketAddr};
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Shortest time after which another source is asked beside a host that has not answered.
const HEDGE: Duration = Duration::from_millis(300);
/// Smallest upload limit: one chunk a second.
const LEAST_UPLOAD: u64 = 1 << 20;

/// Options for peers.
#[derive(Args, Clone, Debug)]
pub struct PeerOptions {
    /// Address of another host (a peer) that streams the same images; give the option once for each. A missing chunk is requested
    /// from the hosts that own it, then from the registry. The list is the same on all hosts, and may have this one in it
    #[arg(long, value_name = "URL", value_parser = peer_address, requires = "peer_listen")]
    peer: Vec<String>,
    /// Send chunks of streamed images to other hosts that connect to this TCP address. Both sides need a certificate of --peer-ca
    #[arg(long, value_name = "ADDR:PORT", requires_all = ["peer", "peer_name", "peer_cert", "peer_key", "peer_ca"])]
    peer_listen: Option<SocketAddr>,
    /// With --peer-listen: address of this host in the lists of the others
    #[arg(long, value_name = "URL", value_parser = peer_address, requires = "peer_listen")]
    peer_name: Option<String>,
    /// With --peer-listen: file with this host's certificate chain for peers (PEM), for the host in --peer-name
    #[arg(long, value_name = "FILE", requires = "peer_listen")]
    peer_cert: Option<PathBuf>,
    /// With --peer-listen: file with that certificate's private key (PEM)
    #[arg(long, value_name = "FILE", requires = "peer_listen")]
    peer_key: Option<PathBuf>,
    /// With --peer-listen: file with the certificate of the authority that signed the certificates of all peers (PEM). Whoever has
    /// a certificate of this authority can read each streamed image whose digest, or whose chunks' digests, they know
    #[arg(long, value_name = "FILE", requires = "peer_listen")]
    peer_ca: Option<PathBuf>,
    /// With --peer-listen or --fleet: most bytes that are sent to other hosts each second, at least 1M
    #[arg(long, value_name = "SIZE", value_parser = upload, default_value = "100M")]
    peer_upload: u64,
}

impl PeerOptions {
    /// Most bytes that are sent to other hosts each second.
    pub fn upload_bytes_per_second(&self) -> u64 {
        self.peer_upload
    }

    /// What the process that serves chunks is told; none if there are no peers.
    ///
    /// # Errors
    /// The path of a file cannot be made absolute.
    pub fn order(self) -> anyhow::Result<Option<PeerOrder>> {
        let PeerOptions { peer, peer_listen, peer_name, peer_cert, peer_key, peer_ca, peer_upload } = self;
        let (Some(listen), Some(name), Some(certificate), Some(key), Some(authority)) =
            (peer_listen, peer_name, peer_cert, peer_key, peer_ca)
        else {
            return Ok(None);
        };
        let mut hosts = peer;
        hosts.sort();
        hosts.dedup();
        Ok(Some(PeerOrder {
            listen,
            name,
            trust: PeerTrust::Authority { file: std::path::absolute(authority)?, hosts },
            certificate: std::path::absolute(certificate)?,
            key: std::path::absolute(key)?,
            files_changed_ns: 0,
            upload_bytes_per_second: peer_upload,
            hedge_milliseconds: HEDGE.as_millis() as u64,
        }))
    }
}

/// How a host of a fleet exchanges chunks with the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetPeers {
    /// Address to listen on.
    pub listen: SocketAddr,
    /// Address that other hosts are told, `HOST:PORT`.
    pub told: String,
    /// Most bytes that are sent to other hosts each second.
    pub upload_bytes_per_second: u64,
}

impl FleetPeers {
    /// What the process that serves chunks is told; its certificate and key are in these files.
    pub fn order(&self, [certificate, key]: [PathBuf; 2]) -> PeerOrder {
        PeerOrder {
            listen: self.listen,
            name: url_of_member(&self.told),
            trust: PeerTrust::Members,
            certificate,
            key,
            files_changed_ns: 0,
            upload_bytes_per_second: self.upload_bytes_per_second,
            hedge_milliseconds: HEDGE.as_millis() as u64,
        }
    }
}

/// The address of a host of a fleet, as all its hosts write it.
pub fn url_of_member(told: &str) -> String {
    format!("https://{told}")
}

/// The order with the time when one of its files was changed the last time: a process that has read older ones is replaced.
pub fn with_time_of_files(mut order: PeerOrder) -> PeerOrder {
    let changed = |path: &Path| {
        let time = fs::metadata(path).and_then(|file| file.modified()).ok()?;
        Some(time.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_nanos() as u64)
    };
    // The process says if one is missing.
    let authority = match &order.trust {
        PeerTrust::Authority { file, .. } => Some(file),
        PeerTrust::Members => None,
    };
    let files = [&order.certificate, &order.key].into_iter().chain(authority);
    order.files_changed_ns = files.filter_map(|path| changed(path)).max().unwrap_or(0);
    order
}

/// An address, in the form in which all hosts write it: their order for each chunk follows from it.
fn peer_address(text: &str) -> Result<String, String> {
    let fault = || "an address of a peer is https://HOST:PORT".to_string();
    let place = text.strip_prefix("https://").ok_or_else(fault)?;
    let place = place.strip_suffix('/').unwrap_or(place);
    let (host, port) = place.rsplit_once(':').ok_or_else(fault)?;
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.');
    let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(address) => format!("[{}]", address.parse::<Ipv6Addr>().map_err(|_| fault())?),
        None if !host.is_empty() && host.chars().all(is_name) => host.to_ascii_lowercase(),
        None => return Err(fault()),
    };
    let port: NonZeroU16 = port.parse().map_err(|_| fault())?;
    Ok(format!("https://{host}:{port}"))
}

fn upload(text: &str) -> Result<u64, String> {
    let bytes = spillway_api::parse_size(text).map_err(|e| e.to_string())?;
    if bytes < LEAST_UPLOAD { Err("peers need at least 1M, a chunk, a second".into()) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        peers: PeerOptions,
    }

    const WHOLE: [&str; 12] = [
        "--peer-listen",
        "[::]:9444",
        "--peer-name",
        "https://A.example.org:9444/",
        "--peer-cert",
        "/cert",
        "--peer-key",
        "/key",
        "--peer-ca",
        "/ca",
        "--peer",
        "https://b.example.org:9444",
    ];

    fn parse(arguments: &[&str]) -> Result<Option<PeerOrder>, String> {
        let parsed = Arguments::try_parse_from(["spillwayd"].iter().chain(arguments));
        parsed.map_err(|e| e.to_string()).map(|arguments| arguments.peers.order().unwrap())
    }

    #[test]
    fn half_a_set_of_options_is_refused() {
        assert_eq!(parse(&[]), Ok(None));
        let order = parse(&WHOLE).unwrap().unwrap();
        assert_eq!(order.name, "https://a.example.org:9444");
        assert_eq!(order.upload_bytes_per_second, 100 << 20);
        for n in 0..WHOLE.len() / 2 {
            let left: Vec<_> = WHOLE.chunks(2).enumerate().filter(|(at, _)| *at != n).collect();
            let left: Vec<_> = left.into_iter().flat_map(|(_, pair)| pair).copied().collect();
            assert!(parse(&left).is_err(), "without {}", WHOLE[2 * n]);
            assert!(parse(&WHOLE[2 * n..2 * n + 2]).is_err(), "{} alone", WHOLE[2 * n]);
        }
        assert_eq!(parse(&["--peer-upload", "1G"]), Ok(None), "a fleet takes it");
        let slow = [&WHOLE[..], &["--peer-upload", "1000K"]].concat();
        assert!(parse(&slow).is_err_and(|why| why.contains("at least 1M")));
    }

    #[test]
    fn all_hosts_write_an_address_in_the_same_way() {
        for (text, address) in [
            ("https://Host-1.example.org:9444", "https://host-1.example.org:9444"),
            ("https://10.0.0.1:09444/", "https://10.0.0.1:9444"),
            ("https://[FD00:0::01]:9444", "https://[fd00::1]:9444"),
        ] {
            assert_eq!(peer_address(text).as_deref(), Ok(address));
        }
        for text in [
            "host:9444",
            "http://host:9444",
            "https://host",
            "https://host:0",
            "https://host:65536",
            "https://:9444",
            "https://user@host:9444",
            "https://host:9444/path",
            "https://host:9444?x",
            "https://[host]:9444",
            "https://fd00::1:9444",
        ] {
            assert!(peer_address(text).is_err(), "{text}");
        }
    }

    #[test]
    fn new_files_make_another_order() {
        let dir = tempfile::tempdir().unwrap();
        let key = dir.path().join("key");
        let order = PeerOrder { key: key.clone(), ..parse(&WHOLE).unwrap().unwrap() };
        assert_eq!(with_time_of_files(order.clone()).files_changed_ns, 0);
        fs::write(&key, "").unwrap();
        let first = with_time_of_files(order.clone());
        assert_eq!(with_time_of_files(first.clone()), first);
        let later = SystemTime::now() + Duration::from_secs(1);
        fs::File::options().write(true).open(&key).unwrap().set_modified(later).unwrap();
        assert!(with_time_of_files(first.clone()).files_changed_ns > first.files_changed_ns);
    }
}
