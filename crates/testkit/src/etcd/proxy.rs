//! A proxy of TCP in front of a member of etcd. It cuts connections, stalls them, and swallows what they carry.
//!
//! Owns its connections and threads. Invariant: in [`ProxyMode::Passes`] each connection carries what the client and the member send,
//! in order and without a gap; one that has lost bytes is closed.

use anyhow::{Context, Result};
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// What a proxy does with connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyMode {
    /// Carries everything.
    Passes,
    /// Carries nothing for now: it is carried later.
    Stalls,
    /// Swallows everything, and answers nothing.
    Swallows,
}

/// A running proxy.
pub struct EtcdProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<ProxyState>,
    changed: Condvar,
}

struct ProxyState {
    mode: ProxyMode,
    has_ended: bool,
    /// Both ends of all connections.
    streams: Vec<TcpStream>,
    connections: u64,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, ProxyState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while it stalls. The mode then, or none once it has ended.
    fn mode(&self) -> Option<ProxyMode> {
        let waits = |state: &mut ProxyState| state.mode == ProxyMode::Stalls && !state.has_ended;
        let state = self.changed.wait_while(self.state(), waits).unwrap_or_else(PoisonError::into_inner);
        (!state.has_ended).then_some(state.mode)
    }

    fn cut(&self) {
        for stream in self.state().streams.drain(..) {
            // It may have ended already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl EtcdProxy {
    /// Starts a proxy at a free port of the address of what is behind it.
    pub fn start(origin: SocketAddr) -> Result<EtcdProxy> {
        let ip: IpAddr = origin.ip();
        let listener = TcpListener::bind((ip, 0)).with_context(|| format!("{ip}: cannot listen"))?;
        let address = listener.local_addr()?;
        let state =
            ProxyState { mode: ProxyMode::Passes, has_ended: false, streams: Vec::new(), connections: 0 };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let of_thread = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming() {
                if of_thread.state().has_ended {
                    return;
                }
                let Ok(client) = client else { continue };
                of_thread.state().connections += 1;
                // A member that is down refuses: so does the proxy then, by closing.
                let Ok(member) = TcpStream::connect(origin) else { continue };
                let _ = carry(&of_thread, &client, &member);
            }
        });
        Ok(EtcdProxy { address, shared })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Number of connections that have come.
    pub fn connections(&self) -> u64 {
        self.shared.state().connections
    }

    /// Changes what it does. Connections that have lost bytes are cut.
    pub fn set_mode(&self, mode: ProxyMode) {
        let before = std::mem::replace(&mut self.shared.state().mode, mode);
        self.shared.changed.notify_all();
        if before == ProxyMode::Swallows && mode != before {
            self.shared.cut();
        }
    }

    /// Ends all connections. New ones are carried.
    pub fn cut(&self) {
        self.shared.cut();
    }
}

impl Drop for EtcdProxy {
    fn drop(&mut self) {
        self.shared.state().has_ended = true;
        self.shared.changed.notify_all();
        self.shared.cut();
        // Its thread waits for a connection.
        let _ = TcpStream::connect(self.address);
    }
}

/// Starts a thread for each direction.
fn carry(shared: &Arc<Shared>, client: &TcpStream, member: &TcpStream) -> std::io::Result<()> {
    for stream in [client, member] {
        stream.set_nodelay(true)?;
        let stream = stream.try_clone()?;
        shared.state().streams.push(stream);
    }
    for (from, to) in [(client, member), (member, client)] {
        let (mut from, mut to) = (from.try_clone()?, to.try_clone()?);
        let shared = Arc::clone(shared);
        thread::spawn(move || {
            let mut bytes = [0; 16 << 10];
            loop {
                let read = match from.read(&mut bytes) {
                    Ok(read) if read > 0 => read,
                    _ => break,
                };
                let done = match shared.mode() {
                    Some(ProxyMode::Swallows) => Ok(()),
                    Some(_) => to.write_all(&bytes[..read]),
                    None => break,
                };
                if done.is_err() {
                    break;
                }
            }
            let _ = from.shutdown(Shutdown::Both);
            // Where it is swallowed, nobody hears of an end either.
            if shared.mode() != Some(ProxyMode::Swallows) {
                let _ = to.shutdown(Shutdown::Both);
            }
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;
    use std::time::Duration;

    #[test]
    fn it_passes_stalls_swallows_and_cuts() {
        let origin = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = EtcdProxy::start(origin.local_addr().unwrap()).unwrap();
        let connect = || {
            let client = TcpStream::connect(proxy.address()).unwrap();
            client.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            (client, origin.accept().unwrap().0)
        };
        let (mut client, mut member) = connect();
        let mut bytes = [0; 2];
        member.write_all(b"ab").unwrap();
        client.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"ab");
        proxy.set_mode(ProxyMode::Stalls);
        member.write_all(b"cd").unwrap();
        assert_eq!(client.read(&mut bytes).unwrap_err().kind(), ErrorKind::WouldBlock);
        proxy.set_mode(ProxyMode::Passes);
        client.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"cd");
        proxy.set_mode(ProxyMode::Swallows);
        member.write_all(b"ef").unwrap();
        assert_eq!(client.read(&mut bytes).unwrap_err().kind(), ErrorKind::WouldBlock);
        proxy.set_mode(ProxyMode::Passes);
        assert_eq!(client.read(&mut bytes).unwrap(), 0, "what has lost bytes is closed");
        let (mut client, mut member) = connect();
        member.write_all(b"gh").unwrap();
        // It is carried now, and not only accepted.
        client.read_exact(&mut bytes).unwrap();
        proxy.cut();
        assert_eq!(client.read(&mut bytes).unwrap(), 0);
    }
}
