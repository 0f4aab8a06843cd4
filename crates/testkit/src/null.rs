//! A disk that does nothing, as fast as it is asked: what a machine on it reaches is the machine's own, and its transport's, ceiling.
//!
//! Owns the process of QEMU's storage daemon that serves `null-co` over vhost-user, as a disk of ours is served. Invariant: a
//! [`NullDisk`] that is dropped has ended.

use crate::process::Server;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long it may take until it listens.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running null disk: it completes every request and keeps nothing.
pub struct NullDisk {
    server: Server,
    vhost: PathBuf,
}

impl NullDisk {
    /// One that claims to hold so many bytes; socket and messages go to `dir`.
    pub fn start(dir: &Path, bytes: u64) -> Result<NullDisk> {
        let vhost = dir.join("vhost");
        let path = vhost.display().to_string().replace(',', ",,");
        let node = format!("driver=null-co,node-name=disk,size={bytes}");
        let export = format!(
            "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={path},num-queues=16,writable=on"
        );
        let arguments = ["--blockdev".into(), node, "--export".into(), export];
        let program = "qemu-storage-daemon";
        let mut server = Server::start(program, program, &arguments, None, &dir.join("null.log"))?;
        server.wait_for(&vhost, PATIENCE).context("a disk that does nothing")?;
        Ok(NullDisk { server, vhost })
    }

    /// The socket that a VMM connects to.
    pub fn vhost(&self) -> PathBuf {
        self.vhost.clone()
    }

    /// The process that serves it.
    pub fn pid(&self) -> u32 {
        self.server.pid()
    }

    /// The command that started it.
    pub fn command(&self) -> &str {
        &self.server.command
    }
}
