//! The packet helpers of libnetfilter_queue.
