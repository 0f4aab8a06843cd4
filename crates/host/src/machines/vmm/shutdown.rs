//! A guest that is asked to shut down: first its agent, then by ACPI's power button. Owns the question to the agent.
//!
//! Invariant: the button is pressed if the guest has not shut down a while after it was asked, again and again until the VMM has
//! confirmed it, and never after that.

use super::super::guest_agent::{self, GuestAgent};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// How long the guest has after its agent has taken the request.
const AGENT_TIME: Duration = Duration::from_secs(20);
/// Delay before the button is pressed again.
const AGAIN: Duration = Duration::from_secs(1);
/// How long an agent that is not there may take to say so, before the caller does something else.
const AT_ONCE: Duration = Duration::from_millis(300);

/// A shutdown that the guest was asked for.
pub struct Shutdown {
    asked: Instant,
    /// Finds out whether the agent has taken the request.
    agent: JoinHandle<bool>,
    taken: Option<bool>,
    is_pressed: bool,
    /// When to press the button again, after an attempt that the VMM has not confirmed.
    again: Option<Instant>,
}

impl Shutdown {
    /// Asks the guest's agent, if there may be one.
    pub async fn begin(agent: Option<GuestAgent>, folder: PathBuf) -> Shutdown {
        let ask = async move {
            match agent {
                Some(agent) => agent.shut_down(&folder).await.is_ok(),
                None => false,
            }
        };
        let mut shutdown = Shutdown {
            asked: Instant::now(),
            agent: tokio::spawn(ask),
            taken: None,
            is_pressed: false,
            again: None,
        };
        if let Ok(taken) = timeout(AT_ONCE, &mut shutdown.agent).await {
            shutdown.taken = Some(taken.unwrap_or(false));
        }
        shutdown
    }

    /// Returns when to press the power button of a guest with this grace. `None`: it was pressed.
    pub async fn press_at(&mut self, grace: Duration) -> Option<Instant> {
        if self.taken.is_none() && self.agent.is_finished() {
            self.taken = Some((&mut self.agent).await.unwrap_or(false));
        }
        let wait = match self.taken {
            Some(false) => Duration::ZERO,
            // A guest whose grace is short has to hear of it soon.
            None => guest_agent::PATIENCE.min(grace / 4),
            Some(true) => AGENT_TIME.min(grace / 2),
        };
        (!self.is_pressed).then(|| self.again.unwrap_or(self.asked + wait))
    }

    /// Notes whether the VMM has confirmed that the button was pressed. Returns when to press it again otherwise.
    pub fn note_press(&mut self, is_pressed: bool) -> Option<Instant> {
        self.is_pressed = is_pressed;
        self.again = (!is_pressed).then(|| Instant::now() + AGAIN);
        self.again
    }

    /// When the guest was asked.
    pub fn asked(&self) -> Instant {
        self.asked
    }
}

impl Drop for Shutdown {
    fn drop(&mut self) {
        self.agent.abort();
    }
}
