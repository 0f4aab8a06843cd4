//! The seed disk: tells a machine's guest its identity whenever it starts from the image again. Owns its files and its
//! format (cloud-init's NoCloud: a small FAT file system with the label CIDATA).
//!
//! Our settings are in `meta-data`, `network-config` and `vendor-data`, which cloud-init provides for the platform;
//! `user-data` belongs to the operator, byte for byte, in any of cloud-init's formats, and wins where both set something.
//!
//! Invariant: a disk is a function of its [`Seed`]: the same seed gives the same bytes, and so the same instance, host
//! name and host key after every reset.

use crate::error::HostError;
use fatfs::{
    Date, DateTime, FatType, FileSystem, FormatVolumeOptions, FsOptions, Time, TimeProvider, format_volume,
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use spillway_api::{ErrorCode, Identity, Name};
use ssh_key::private::{Ed25519Keypair, KeypairData};
use ssh_key::{LineEnding, PrivateKey};
use std::fmt;
use std::io::{self, Cursor, Write};
use utoipa::ToSchema;

/// Size of the disk.
pub const SEED_BYTES: usize = 1 << 20;
/// Largest user-data. The rest of the disk is for our files and the file system.
pub const MOST_USER_DATA_BYTES: usize = 512 << 10;

/// Names of the files that cloud-init reads.
const META_DATA: &str = "meta-data";
const USER_DATA: &str = "user-data";
const VENDOR_DATA: &str = "vendor-data";
const NETWORK_CONFIG: &str = "network-config";
/// How often cloud-init tries to phone home, with pauses of 3 s.
const PHONE_TRIES: u32 = 100;
/// First line of a cloud-config file. JSON follows, which is YAML that needs no care with quotes.
const CLOUD_CONFIG: &str = "#cloud-config\n";

/// Contents of a seed disk.
#[derive(Clone, Debug)]
pub struct Seed<'a> {
    /// Name of the machine, and its host name.
    pub name: &'a Name,
    /// UUID, which names the instance.
    pub identity: &'a Identity,
    /// Host key of the SSH server.
    pub host_key: &'a HostKey,
    /// MAC addresses of the network cards that take part in a network: IPv4 by DHCP, and IPv6 addresses by router advertisement.
    pub cards: &'a [String],
    /// Public keys that may log in, each a line of `authorized_keys`, in addition to those in user-data.
    pub authorized_keys: &'a [String],
    /// The operator's data for cloud-init, in any of its formats.
    pub user_data: Option<&'a str>,
    /// URL to which the guest sends a POST when it is ready. It has a secret.
    pub phone_home: Option<&'a str>,
}

/// An SSH host key (Ed25519), created once for a machine and kept with it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostKey {
    /// Private key in OpenSSH's format. A secret.
    pub private: String,
    /// Public key in one line: type and key.
    pub public: String,
}

impl fmt::Debug for HostKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostKey").field("public", &self.public).finish_non_exhaustive()
    }
}

/// Creates a host key.
pub fn host_key() -> Result<HostKey, HostError> {
    let mut secret = [0; 32];
    let failed = |why: String| HostError::new(ErrorCode::Internal, format!("no host key can be made: {why}"));
    // So few bytes are never cut short. Early after boot the call waits for randomness.
    let got = rustix::rand::getrandom(&mut secret[..], rustix::rand::GetRandomFlags::empty());
    if got.map_err(|e| failed(e.to_string()))? != secret.len() {
        return Err(failed("the kernel gives no random bytes".into()));
    }
    let pair = KeypairData::from(Ed25519Keypair::from_seed(&secret));
    let make = || {
        let private = PrivateKey::new(pair, "")?;
        let public = private.public_key().to_openssh()?;
        Ok(HostKey { private: private.to_openssh(LineEnding::LF)?.to_string(), public })
    };
    make().map_err(|e: ssh_key::Error| failed(e.to_string()))
}

impl Seed<'_> {
    /// Creates the disk, of [`SEED_BYTES`] bytes.
    pub fn disk(&self) -> Result<Vec<u8>, HostError> {
        let files = self.files()?;
        let failed = |why: &dyn fmt::Display| {
            let message = format!("{}: its seed disk cannot be made: {why}", self.name);
            HostError::new(ErrorCode::Internal, message)
        };
        let uuid = uuid::Uuid::parse_str(&self.identity.uuid).map_err(|e| failed(&e))?;
        write(uuid.as_fields().0, &files).map_err(|e| failed(&e))
    }

    fn files(&self) -> Result<[(&'static str, String); 4], HostError> {
        let user_data = self.user_data.unwrap_or(CLOUD_CONFIG);
        if user_data.len() > MOST_USER_DATA_BYTES {
            let message =
                format!("user-data has {} bytes: {MOST_USER_DATA_BYTES} are the most", user_data.len());
            return Err(HostError::new(ErrorCode::TooLarge, message));
        }
        if let Some(key) = self.authorized_keys.iter().find(|key| key.contains(char::is_control)) {
            return Err(HostError::invalid(format!("'{}' is not one line", key.escape_debug())));
        }
        let mut meta_data = json!({
            "instance-id": format!("iid-{}", self.identity.uuid),
            "local-hostname": self.name,
            "public-keys": self.authorized_keys,
        });
        let mut vendor_data = json!({
            "hostname": self.name,
            "preserve_hostname": false,
            // Delete the image's keys of all types; create no others.
            "ssh_deletekeys": true,
            "ssh_keys": {
                "ed25519_private": self.host_key.private,
                "ed25519_public": self.host_key.public,
            },
        });
        if let Some(url) = self.phone_home {
            // For scripts of the operator.
            meta_data["phone_home_url"] = url.into();
            if !user_data.contains("phone_home") {
                let post = ["instance_id", "hostname"];
                vendor_data["phone_home"] = json!({ "url": url, "post": post, "tries": PHONE_TRIES });
            }
        }
        // The lease follows the card, whatever identity the image contains. Renderers other than netplan take the name from
        // `set-name`.
        let ethernet = |(number, mac): (usize, &String)| {
            let name = format!("eth{number}");
            let card = json!({
                "match": { "macaddress": mac },
                "set-name": name,
                "dhcp4": true,
                "dhcp-identifier": "mac",
            });
            (name, card)
        };
        let ethernets: serde_json::Map<_, _> = self.cards.iter().enumerate().map(ethernet).collect();
        let network_config = json!({ "version": 2, "ethernets": ethernets });
        Ok([
            (META_DATA, format!("{meta_data}\n")),
            (USER_DATA, user_data.to_owned()),
            (VENDOR_DATA, format!("{CLOUD_CONFIG}{vendor_data}\n")),
            (NETWORK_CONFIG, format!("{network_config}\n")),
        ])
    }
}

/// Earliest time that FAT can represent.
#[derive(Debug)]
struct Epoch;

impl TimeProvider for Epoch {
    fn get_current_date(&self) -> Date {
        Date { year: 1980, month: 1, day: 1 }
    }

    fn get_current_date_time(&self) -> DateTime {
        DateTime { date: self.get_current_date(), time: Time { hour: 0, min: 0, sec: 0, millis: 0 } }
    }
}

/// Creates a file system with these files in its root folder.
fn write(serial: u32, files: &[(&str, String)]) -> io::Result<Vec<u8>> {
    let mut disk = Cursor::new(vec![0; SEED_BYTES]);
    let options = FormatVolumeOptions::new()
        .fat_type(FatType::Fat12)
        .bytes_per_cluster(1024)
        .max_root_dir_entries(64)
        .volume_id(serial)
        .volume_label(*b"CIDATA     ");
    format_volume(&mut disk, options)?;
    let system = FileSystem::new(&mut disk, FsOptions::new().time_provider(&Epoch))?;
    for (name, content) in files {
        let mut file = system.root_dir().create_file(name)?;
        file.write_all(content.as_bytes())?;
        file.flush()?;
    }
    system.unmount()?;
    Ok(disk.into_inner())
}

#[cfg(test)]
mod tests;
