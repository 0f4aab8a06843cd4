//! What happens to a request. Owns the random choices, which follow from the seed, the request's method and address, and how often
//! the same was asked before: so they are the same in every run, in whatever order requests of different objects arrive.
//!
//! Invariant: a request draws the same numbers whatever the model is.

use super::model::{StoreFault, StoreModel};
use crate::Rng;
use std::time::Duration;

/// Standard deviations from the median of a normal distribution to its 99th percentile.
const TO_P99: f64 = 2.326_348;

/// Random numbers of one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fate {
    /// Normally distributed, around 0 with a deviation of 1.
    normal: f64,
    /// From 0 to 1, below 1.
    fault: f64,
    /// Which part of a body, of other objects, of before and after.
    place: u64,
}

impl Fate {
    /// The numbers of the request with this method and address that is asked for the `nth` time.
    pub fn of(seed: u64, request: &str, nth: u64) -> Fate {
        // FNV-1a, and the generator mixes it.
        let hash = request.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let mut random = Rng::new(Rng::new(seed ^ hash).next_u64() ^ nth);
        let mut unit = || (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        // Box-Muller; a logarithm of 0 would be infinite.
        let (radius, angle) = ((-2.0 * (1.0 - unit()).ln()).sqrt(), unit() * std::f64::consts::TAU);
        Fate { normal: radius * angle.cos(), fault: unit(), place: random.next_u64() }
    }

    /// Time to the first byte.
    pub fn latency(&self, model: &StoreModel) -> Duration {
        let median = model.latency_ns as f64;
        if model.latency_p99_ns == 0 || model.latency_ns == 0 {
            return Duration::from_nanos(model.latency_ns);
        }
        let deviation = (model.latency_p99_ns as f64 / median).ln() / TO_P99;
        // The conversion ends at the largest number.
        Duration::from_nanos((median * (deviation * self.normal).exp()) as u64)
    }

    /// The fault that its chance gives it.
    pub fn fault(&self, model: &StoreModel) -> Option<StoreFault> {
        let mut below = 0.0;
        model.faults.iter().find_map(|(fault, chance)| {
            below += chance;
            (self.fault < below).then_some(*fault)
        })
    }

    /// A place below `n`, or 0.
    pub fn place(&self, n: usize) -> usize {
        ((u128::from(self.place) * n as u128) >> 64) as usize
    }

    /// One of eight bits.
    pub fn bit(&self) -> u8 {
        1 << (self.place & 7)
    }

    /// Whether the store carries out a request whose connection is reset.
    pub fn reaches_the_store(&self) -> bool {
        self.place & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(seed: u64) -> Vec<Fate> {
        (0..200)
            .flat_map(|nth| (0..50).map(move |key| Fate::of(seed, &format!("GET /chunks/{key}"), nth)))
            .collect()
    }

    #[test]
    fn a_seed_repeats_and_another_one_does_not() {
        assert_eq!(all(1), all(1));
        let same = all(1).iter().zip(&all(2)).filter(|(a, b)| a == b).count();
        assert_eq!(same, 0);
    }

    #[test]
    fn times_have_the_median_and_the_percentile_of_the_model() {
        let model =
            StoreModel { latency_ns: 30_000_000, latency_p99_ns: 300_000_000, ..StoreModel::default() };
        let mut times: Vec<_> = all(3).iter().map(|fate| fate.latency(&model).as_secs_f64()).collect();
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times[(times.len() as f64 * share) as usize];
        assert!((0.028..0.032).contains(&at(0.5)), "{}", at(0.5));
        assert!((0.25..0.36).contains(&at(0.99)), "{}", at(0.99));
        let fixed = StoreModel { latency_p99_ns: 0, ..model };
        assert!(all(3).iter().all(|fate| fate.latency(&fixed) == Duration::from_millis(30)));
    }

    #[test]
    fn faults_come_as_often_as_their_chances_say() {
        let faults = [(StoreFault::CutBody, 0.1), (StoreFault::Status503, 0.3)];
        let model = StoreModel { faults: faults.into(), ..StoreModel::default() };
        for (fault, chance) in faults {
            let found = all(5).iter().filter(|fate| fate.fault(&model) == Some(fault)).count();
            assert!((found as f64 / 10_000.0 - chance).abs() < 0.02, "{fault:?} {found}");
        }
        let always = StoreModel { faults: [(StoreFault::Reset, 1.0)].into(), ..StoreModel::default() };
        assert!(all(5).iter().all(|fate| fate.fault(&always) == Some(StoreFault::Reset)));
        let places: Vec<_> = all(5).iter().map(|fate| fate.place(10)).collect();
        assert!((0..10).all(|n| places.contains(&n)) && places.iter().all(|place| *place < 10));
        assert_eq!(all(5)[0].place(0), 0);
    }
}
