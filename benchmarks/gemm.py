"""The machine's measured peak in float32 matrix products, against which work is compared.

python -m benchmarks.gemm
"""

from fedjax_mm.cli.speed import gemm_peak

if __name__ == "__main__":
    for form, speed in gemm_peak((512, 1024, 2048, 4096)).items():
        print(f"{form}: {speed:,.0f} GFLOP/s")
