//! Medians, which limit the effect of other load on the machine.

/// Returns the median; for an even number of values, the mean of the middle two; `NaN` for none.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn median_of_odd_and_even() {
        let rows: &[(&[f64], f64)] =
            &[(&[3.0], 3.0), (&[9.0, 1.0], 5.0), (&[9.0, 1.0, 2.0], 2.0), (&[4.0, 1.0, 3.0, 2.0], 2.5)];
        for (values, expected) in rows {
            assert_eq!(median(values), *expected, "{values:?}");
        }
        assert!(median(&[]).is_nan());
    }
}
