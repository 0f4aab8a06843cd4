//! What every size of the RAM tier would have done, of all machines: asked of their disks, all at once and seldom. Owns
//! what they said last.
//!
//! Invariant: a disk that does not answer is told of as it was; one that is served no more is not.

use super::{PATIENCE, answer, connect};
use crate::error::HostError;
use crate::machines::{Machines, View, blocking};
use spillway_api::{CurveFigures, DiskCurve, Name, Selector};
use spillway_control::Request;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Asked again sooner, the answer is the same: a curve changes with hours, and its disk's worker stops to draw it.
const FRESH: Duration = Duration::from_secs(30);

/// What disks have said, by machine: each with its catalog.
pub type CurvesOf = BTreeMap<Name, (Name, CurveFigures)>;

/// What was asked last, and when.
pub type Curves = tokio::sync::Mutex<Option<(Instant, Arc<CurvesOf>)>>;

impl Machines {
    /// The curves of all machines that have a RAM tier, not much older than half a minute.
    pub async fn curves(&self) -> Result<Arc<CurvesOf>, HostError> {
        let mut last = self.shared.figures.curves.lock().await;
        if let Some((at, curves)) = &*last
            && at.elapsed() < FRESH
        {
            return Ok(Arc::clone(curves));
        }
        let machines = self.clone();
        let views = blocking(move || machines.views(&Selector::default())).await?;
        let served: Vec<&View> = views.iter().filter(|view| has_curve(view)).collect();
        let until = Instant::now() + PATIENCE;
        let mut curves = CurvesOf::new();
        let known = last.as_ref().map(|(_, known)| known);
        for view in &served {
            if let Some(of) = known.and_then(|known| known.get(&view.machine.name)) {
                curves.insert(view.machine.name.clone(), of.clone());
            }
        }
        for (view, figures) in self.shared.ask_all(served.into_iter(), until, ask).await {
            curves.insert(view.machine.name.clone(), (view.machine.catalog.clone(), figures));
        }
        let curves = Arc::new(curves);
        *last = Some((Instant::now(), Arc::clone(&curves)));
        Ok(curves)
    }
}

fn has_curve(view: &View) -> bool {
    view.status.run.as_ref().is_some_and(|run| run.disk_pid.is_some() && run.ram_bytes.is_some())
}

async fn ask(folder: PathBuf) -> io::Result<CurveFigures> {
    let curve = answer(&mut connect(&folder).await?, &Request::Curve { goal: None }).await?;
    let curve: DiskCurve = serde_json::from_value(curve)?;
    Ok(CurveFigures::from(&curve))
}
