# cython: language_level=3
"""What this CPU can do, and its memory fence. Built once, for the baseline ISA."""

cdef extern from *:
    """
    #if defined(__x86_64__)
    static int pcl_cpu_supports(const char *feature) {
        __builtin_cpu_init();
        #define PCL_FEATURE(name) if (!strcmp(feature, name)) return !!__builtin_cpu_supports(name);
        PCL_FEATURE("avx2") PCL_FEATURE("fma") PCL_FEATURE("avx512f") PCL_FEATURE("avx512dq")
        PCL_FEATURE("avx512bw") PCL_FEATURE("avx512vl")
        return -1;
    }
    #else
    static int pcl_cpu_supports(const char *feature) { return -1; }
    #endif
    static void pcl_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
    """
    int pcl_cpu_supports(const char* feature)
    void pcl_fence()


def supports(str feature):
    """Whether this CPU and its operating system have a feature, in the words of ``__builtin_cpu_supports``."""
    found = pcl_cpu_supports(feature.encode())
    if found < 0:
        raise ValueError(f"feature: got {feature!r}, which cpu.pyx does not know how to ask for")
    return bool(found)


def fence():
    """Order memory for other processes: what was read or written before comes before all that follows."""
    pcl_fence()
