//! Bytes of a WebSocket that are passed on between its client and another host, as they are. Owns the time limits.
//!
//! Invariant: [`BUFFER_BYTES`] of each direction are in memory. A tunnel ends when either side does, when the host is silent for longer
//! than its pings are apart, and when its user may not have it any more.

use crate::access::Peer;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio::time::{sleep, timeout};

/// Bytes that are passed on at a time.
const BUFFER_BYTES: usize = 16 << 10;
/// Longest time until both sides have become WebSockets.
const BEGIN: Duration = Duration::from_secs(30);
/// Longest time in which the host sends nothing: it sends a ping every 30 s.
const SILENCE: Duration = Duration::from_secs(90);
/// Longest time in which one side takes nothing, and that the host takes to end after its client.
const STALL: Duration = Duration::from_secs(30);
const GOODBYE: Duration = Duration::from_secs(5);

/// Passes bytes on until one side ends, or `over` returns.
pub async fn relay(client: OnUpgrade, target: OnUpgrade, peer: Peer, over: impl Future<Output = ()>) {
    let Ok(Ok((client, target))) = timeout(BEGIN, async { tokio::try_join!(client, target) }).await else {
        return;
    };
    let (client_read, client_write) = split(TokioIo::new(client));
    let (target_read, target_write) = split(TokioIo::new(target));
    let up = async {
        let _ = copy(client_read, target_write, None).await;
        sleep(GOODBYE).await;
    };
    let down = copy(target_read, client_write, Some(SILENCE));
    tokio::select! {
        () = up => {}
        _ = down => {}
        () = over => {}
        () = peer.place.closed() => {}
    }
}

/// Copies one direction to its end, and ends the other side then. `silence`: longest time without data.
async fn copy(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    silence: Option<Duration>,
) -> io::Result<()> {
    let late = || io::Error::from(io::ErrorKind::TimedOut);
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let read = from.read(&mut buffer);
        let length = match silence {
            Some(silence) => timeout(silence, read).await.map_err(|_| late())??,
            None => read.await?,
        };
        if length == 0 {
            break;
        }
        let written = async {
            to.write_all(&buffer[..length]).await?;
            to.flush().await
        };
        timeout(STALL, written).await.map_err(|_| late())??;
    }
    timeout(STALL, to.shutdown()).await.map_err(|_| late())?
}
