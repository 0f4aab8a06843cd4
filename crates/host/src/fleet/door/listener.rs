//! The listener for the daemons of other hosts. Owns the port and the time limit of a handshake.
//!
//! Invariant: who is no member gets no further than the handshake.

use super::caller::MemberPeer;
use super::identity::{CertificateDigest, Identity};
use super::members::Members;
use super::verify::server_config;
use anyhow::{Context, Result};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Longest time of a handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// The open listener.
pub struct FleetListener {
    listener: TcpListener,
    acceptor: TlsAcceptor,
    members: Members,
}

impl FleetListener {
    /// Opens the listener.
    pub async fn open(address: SocketAddr, identity: &Identity, members: Members) -> Result<FleetListener> {
        let listener =
            TcpListener::bind(address).await.with_context(|| format!("--fleet-listen {address}"))?;
        let acceptor = TlsAcceptor::from(Arc::new(server_config(identity, members.clone())));
        Ok(FleetListener { listener, acceptor, members })
    }

    /// Address of the listener: the kernel may have chosen the port.
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }

    /// Accepts the next connection. Cancel safe.
    pub async fn next(&self) -> Option<PendingMember> {
        let (stream, address) = self.listener.accept().await.ok()?;
        Some(PendingMember {
            stream,
            address,
            acceptor: self.acceptor.clone(),
            members: self.members.clone(),
        })
    }
}

/// A connection before its TLS handshake.
pub struct PendingMember {
    stream: TcpStream,
    /// Address of the peer.
    pub address: SocketAddr,
    acceptor: TlsAcceptor,
    members: Members,
}

impl PendingMember {
    /// Does the TLS handshake; `None` if that fails or takes too long, or the peer is no member.
    pub async fn greet(self) -> Option<(TlsStream<TcpStream>, MemberPeer)> {
        let _ = self.stream.set_nodelay(true);
        let greeted = tokio::time::timeout(HANDSHAKE, self.acceptor.accept(self.stream)).await;
        let stream = greeted.ok()?.ok()?;
        let shown = CertificateDigest::of(stream.get_ref().1.peer_certificates()?.first()?);
        let peer = MemberPeer::of(shown, &self.members)?;
        Some((stream, peer))
    }
}
