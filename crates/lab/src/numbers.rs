//! Numbers as people read them, and where an axis has its marks.
//!
//! Invariant: whatever the number, what is written is short and an axis has at most six marks.

/// The value, if it is a number that a study can have measured.
pub fn plausible(value: f64) -> Option<f64> {
    (value.is_finite() && (0.0..1e21).contains(&value)).then_some(value)
}

/// Writes a number with four significant digits and thousands apart: 123,485; 459.1; 0.52.
pub fn number(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        return "-".into();
    }
    if size >= 1e15 {
        return format!("{value:.2e}");
    }
    let decimals = match size {
        _ if size >= 1000.0 || size == 0.0 => 0,
        _ if size >= 100.0 => 1,
        _ if size >= 10.0 => 2,
        _ if size >= 1.0 => 3,
        _ => 4,
    };
    if size > 0.0 && size < 0.0001 {
        return "<0.0001".into();
    }
    let text = format!("{value:.decimals$}");
    match text.split_once('.') {
        Some((whole, part)) => match part.trim_end_matches('0') {
            "" => apart(whole),
            part => format!("{}.{part}", apart(whole)),
        },
        None => apart(&text),
    }
}

fn apart(whole: &str) -> String {
    let (sign, digits) = whole.strip_prefix('-').map_or(("", whole), |digits| ("-", digits));
    let mut out = String::from(sign);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Writes a ratio: in percent below 10, else as a factor.
pub fn ratio(value: f64) -> String {
    match value {
        v if v >= 10.0 => format!("\u{d7}{}", number(round(v))),
        v if v > 0.0 && v < 0.000_05 => "<0.01%".into(),
        v if v >= 0.995 => format!("{:.0}%", v * 100.0),
        v if v > 0.0 && v < 0.01 => format!("{}%", number((v * 10_000.0).round() / 100.0)),
        v => format!("{}%", number((v * 1000.0).round() / 10.0)),
    }
}

/// Writes a factor.
pub fn factor(value: f64) -> String {
    format!("\u{d7}{}", number(round(value)))
}

/// Rounds to three significant digits.
fn round(value: f64) -> f64 {
    if value <= 0.0 || !value.is_finite() {
        return value;
    }
    let unit = 10f64.powf(value.log10().floor() - 2.0);
    (value / unit).round() * unit
}

/// Marks of an axis from 0 to at least `most`: the last is its end.
pub fn ticks(most: f64) -> Vec<f64> {
    let most = plausible(most).filter(|&m| m > 1e-12).unwrap_or(1.0);
    let decade = 10f64.powf((most / 5.0).log10().floor());
    let round = |n: f64| n != 2.5 || decade >= 10.0;
    let mut steps = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().filter(|n| round(*n)).map(|n| n * decade);
    let step = steps.find(|step| step * 5.0 >= most * (1.0 - 1e-9)).unwrap_or(most);
    let count = (most / step - 1e-9).ceil().clamp(1.0, 5.0) as u32;
    (0..=count).map(|i| f64::from(i) * step).collect()
}

/// A mark of [`ticks`], written as shortly as its neighbours allow.
pub fn tick(value: f64, step: f64) -> String {
    let (divisor, unit) = match step {
        s if s >= 1e9 => (1e9, " G"),
        s if s >= 1e6 => (1e6, " M"),
        _ => (1.0, ""),
    };
    let decimals = (-(step / divisor).log10().floor()).clamp(0.0, 12.0) as usize;
    let text = format!("{:.decimals$}", value / divisor);
    if value == 0.0 {
        return "0".into();
    }
    let (whole, part) = text.split_once('.').map_or((text.as_str(), None), |(w, p)| (w, Some(p)));
    let part = part.map_or_else(String::new, |part| format!(".{part}"));
    format!("{}{part}{unit}", apart(whole))
}

/// Powers of ten from below `least` to above `most`, at most six: as exponents.
pub fn decades(least: f64, most: f64) -> Vec<i32> {
    let low = least.log10().floor() as i32;
    let high = (most.log10().ceil() as i32).max(low + 1);
    let step = (high - low + 4) / 5;
    let count = (high - low + step - 1) / step;
    (0..=count).map(|i| low + i * step).collect()
}

/// Seconds along an axis that ends at `end`: marks, what one is written in, and its name.
pub fn times(end: f64) -> (Vec<f64>, f64, &'static str) {
    const STEPS: [f64; 22] = [
        1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 180.0, 240.0, 300.0, 600.0, 900.0, 1200.0,
        1800.0, 3600.0, 7200.0, 14400.0, 28800.0, 86400.0, 172_800.0,
    ];
    let step = STEPS.into_iter().find(|step| end / step <= 5.0).unwrap_or(STEPS[STEPS.len() - 1]);
    let (unit, name) = match step {
        s if s >= 3600.0 => (3600.0, "h"),
        s if s >= 60.0 => (60.0, "min"),
        _ => (1.0, "s"),
    };
    let count = (end / step).floor().clamp(0.0, 5.0) as u32;
    ((0..=count).map(|i| f64::from(i) * step).collect(), unit, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let written = [0.0, 459.13, 123_484.8, 0.52, 1.88, 1e-7, 66.2, -1234.0, 1e16, f64::NAN].map(number);
        assert_eq!(
            written,
            ["0", "459.1", "123,485", "0.52", "1.88", "<0.0001", "66.2", "-1,234", "1.00e16", "-"]
        );
        let ratios = [0.0, 0.00001, 0.001_15, 0.061, 0.9951, 1.0, 2.5, 268.96].map(ratio);
        assert_eq!(ratios, ["0%", "<0.01%", "0.12%", "6.1%", "100%", "100%", "250%", "\u{d7}269"]);
    }

    #[test]
    fn axes_have_few_round_marks_and_reach_the_value() {
        for most in [1e-9, 0.07, 0.5, 1.0, 4.1, 5.0, 99.0, 123_484.8, 3.1e13, 9.9e20] {
            let marks = ticks(most);
            assert!((2..=6).contains(&marks.len()), "{most}: {marks:?}");
            assert!(marks[marks.len() - 1] >= most * 0.999_999, "{most}: {marks:?}");
        }
        assert_eq!(ticks(4.1), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        for strange in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(ticks(strange).last(), Some(&1.0));
        }
        assert_eq!([0.2, 1500.0, 2_500_000.0].map(|v| tick(v, v / 5.0)), ["0.20", "1,500", "2,500,000"]);
        assert_eq!(tick(4e6, 1e6), "4 M");
        for (least, most) in [(1.0, 10.0), (3.0, 4.0), (1e-4, 1e21), (0.5, 2e6)] {
            let marks = decades(least, most);
            assert!((2..=6).contains(&marks.len()), "{least} {most}: {marks:?}");
            assert!(10f64.powi(marks[0]) <= least && 10f64.powi(marks[marks.len() - 1]) >= most, "{marks:?}");
        }
        for end in [0.0, 1.0, 59.0, 90.0, 299.0, 1800.0, 604_800.0] {
            let (marks, unit, _) = times(end);
            assert!((1..=6).contains(&marks.len()) && unit >= 1.0, "{end}: {marks:?}");
        }
    }
}
